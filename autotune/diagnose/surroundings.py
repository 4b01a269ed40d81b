"""What an interpreter has around it, asked of itself: packages with their requirements, and the machine's shared memory.

No package is imported, so a broken one can be asked about too.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import msgspec

from autotune.errors import TrainingEnvironmentError
from autotune.failures import Surroundings

SECONDS = 60

_ASK = """
import importlib.metadata, json, os, re, sys
packages, requires = {}, {}
for found in importlib.metadata.distributions():
    try:
        name, version = found.metadata["Name"], found.version
    except Exception:
        continue
    if name and version:
        name = re.sub(r"[-_.]+", "-", name).lower()
        if name not in packages:
            packages[name], requires[name] = version, found.requires or []
try:
    shm = os.statvfs("/dev/shm")
    shm_bytes = shm.f_frsize * shm.f_blocks
except OSError:
    shm_bytes = None
print(json.dumps({"packages": packages, "requires": requires, "shm_bytes": shm_bytes}))
"""


class _Answer(msgspec.Struct):
    packages: dict[str, str]
    requires: dict[str, tuple[str, ...]]
    shm_bytes: int | None


def surroundings_of(python: Path) -> Surroundings:
    """Of this interpreter, with the variables of this process, which is what a training started here would have."""
    try:
        told = subprocess.run([str(python), "-c", _ASK], capture_output=True, timeout=SECONDS, check=True).stdout
        answer = msgspec.json.decode(told.strip().splitlines()[-1], type=_Answer)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError) as error:
        raise TrainingEnvironmentError(
            f"{python} can't be started as a Python interpreter. Name the training environment's with --python."
        ) from error
    return Surroundings(
        packages=answer.packages, requires=answer.requires, variables=dict(os.environ), shm_bytes=answer.shm_bytes
    )
