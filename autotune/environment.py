"""The training environment behind `--python`, looked at from outside: does it start, and what has it installed?"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.errors import TrainingEnvironmentError

SUPPORTED: Mapping[str, Mapping[str, tuple[str, str]]] = {"trl": {"trl": ("1.0.0", "1.17")}}
"""By framework: package -> (oldest version that is tested, first that is not). The extra `train` says the same to pip."""

_ASK = """
import importlib.util, json, sys
print(json.dumps({name: importlib.util.find_spec(name) is not None for name in sys.argv[1:]}))
"""
"""find_spec looks without importing, so that the answer takes no longer than starting an interpreter."""


def interpreter(python: str | None) -> Path:
    """The interpreter that probes run under: autotune's own unless another is named."""
    if python is None:
        return Path(sys.executable)
    found = shutil.which(str(Path(python).expanduser()))
    if found is None:
        raise TrainingEnvironmentError(f"--python {python} is no program. Give the path of the training environment's python.")
    # Not resolved: a virtual environment is known by the path of its link.
    return Path(found).absolute()


_ASK_VERSIONS = """
import importlib.metadata, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""
"""Distributions, under the names that pip installs them by."""


def installed(python: Path, packages: Sequence[str]) -> Mapping[str, bool]:
    """Which of these packages the interpreter would find."""
    return {name: bool(found) for name, found in _asked(python, _ASK, packages).items()}


def versions(python: Path, packages: Sequence[str]) -> Mapping[str, str | None]:
    """Which version of each the interpreter has; None where it has none."""
    return {name: found if isinstance(found, str) else None for name, found in _asked(python, _ASK_VERSIONS, packages).items()}


def _asked(python: Path, program: str, packages: Sequence[str]) -> dict[str, object]:
    try:
        answer = subprocess.run([str(python), "-c", program, *packages], capture_output=True, text=True, timeout=60, check=True)
        found: dict[str, object] = json.loads(answer.stdout.strip().splitlines()[-1])
        return {name: found[name] for name in packages}
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        raise TrainingEnvironmentError(f"{python} can't be started as a Python interpreter: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
    return (str(said).strip().splitlines() or ["no reason given"])[-1].rstrip(".")
