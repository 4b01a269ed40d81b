"""Training environment of `--python`: interpreter and installed packages, queried from outside."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from autotune.core.errors import TrainingEnvironmentError

SUPPORTED: Mapping[str, Mapping[str, tuple[str, str]]] = {"trl": {"trl": ("1.0.0", "1.17")}}
"""Framework -> package -> (oldest tested version, first untested), as in the extra `train`."""

_ASK = """
import importlib.util, json, sys
def found(name):
    return importlib.util.find_spec(name) is not None
def folder(name):
    spec = importlib.util.find_spec(name)
    places = list((spec and spec.submodule_search_locations) or [])
    return places[0] if places else None
def version(name):
    import importlib.metadata
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps({name: globals()[sys.argv[1]](name) for name in sys.argv[2:]}))
"""
"""Imports no package, which keeps the query as fast as starting Python. Versions are of
distributions, under their pip names.
"""


def interpreter(python: str | None) -> Path:
    """Return the interpreter for probes: `--python`, or autotune's own."""
    if python is None:
        return Path(sys.executable)
    found = shutil.which(str(Path(python).expanduser()))
    if found is None:
        raise TrainingEnvironmentError(
            f"--python {python} is no program. Give the path of the training environment's python."
        )
    # Not resolved: the link's path identifies a virtual environment.
    return Path(found).absolute()


def installed(python: Path, packages: Sequence[str]) -> Mapping[str, bool]:
    """Return package -> True if the interpreter finds it."""
    return {name: bool(found) for name, found in _asked(python, "found", packages).items()}


def versions(python: Path, packages: Sequence[str]) -> Mapping[str, str | None]:
    """Return package -> installed version, or None."""
    return {
        name: found if isinstance(found, str) else None
        for name, found in _asked(python, "version", packages).items()
    }


def package_folder(python: Path, package: str) -> Path | None:
    """Return the folder of an installed package, which is not imported; None without one."""
    found = _asked(python, "folder", (package,))[package]
    return Path(found) if isinstance(found, str) else None


def _asked(python: Path, question: str, packages: Sequence[str]) -> dict[str, object]:
    try:
        answer = subprocess.run(
            [str(python), "-c", _ASK, question, *packages],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        found: dict[str, object] = json.loads(answer.stdout.strip().splitlines()[-1])
        return {name: found[name] for name in packages}
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        message = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        reason = (str(message).strip().splitlines() or ["no reason given"])[-1].rstrip(".")
        raise TrainingEnvironmentError(
            f"{python} can't be started as a Python interpreter: {reason}."
        ) from error
