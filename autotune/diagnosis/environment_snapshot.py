"""Facts about an interpreter's environment, collected by running it: packages, requirements, size of
/dev/shm.

No package is imported, so that a broken one can be listed too.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec

from autotune.core.errors import TrainingEnvironmentError
from autotune.failures.environment_traps import EnvironmentFacts

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


def environment_facts(python: Path) -> EnvironmentFacts:
    """Return the facts about an interpreter, with the variables of this process, which a training started here would inherit."""
    try:
        reported = subprocess.run([str(python), "-c", _ASK], capture_output=True, timeout=SECONDS, check=True).stdout
        facts = msgspec.json.decode(reported.strip().splitlines()[-1], type=EnvironmentFacts)
    except (OSError, subprocess.SubprocessError, msgspec.DecodeError, IndexError) as error:
        raise TrainingEnvironmentError(
            f"{python} can't be started as a Python interpreter. Name the training environment's with --python."
        ) from error
    return replace(facts, variables=dict(os.environ))
