"""Any training command: its placeholders are the knobs, and nothing else of it is known.

Memory is measured from outside, running out of it is told by the exit and the last words, and speed by what the command itself
writes. So nothing can be predicted of it, nothing is illegal, and nobody knows what a placeholder changes but the user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from autotune.candidate import Candidate, Knobs, KnobValue, fingerprint
from autotune.space import SearchSpace
from autotune.trainers.base import Job, ProbePlan
from autotune.trainers.launching import OUT, Figures, Launch, Launched

NAME = "command"
METHOD = "training"
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
OWN = frozenset({"out"})
"""Placeholders that autotune fills in itself: `{out}` is the run's own folder."""


def placeholders(argv: Sequence[str]) -> tuple[str, ...]:
    """The names in braces, in their order. Other braces, of JSON say, are the command's own."""
    found = dict.fromkeys(name for word in argv for name in _PLACEHOLDER.findall(word))
    return tuple(name for name in found if name not in OWN)


def filled(argv: Sequence[str], settings: Mapping[str, KnobValue]) -> tuple[str, ...]:
    """The command line with every placeholder's value in it; `{out}` stays for whoever starts it."""
    return tuple(_PLACEHOLDER.sub(lambda match: _value(match, settings), word) for word in argv)


def _value(match: re.Match[str], settings: Mapping[str, KnobValue]) -> str:
    if match[1] not in settings:
        return match[0]
    value = settings[match[1]]
    return str(value).lower() if isinstance(value, bool) else str(value)


class Command(Launched):
    """A command line of the user's own."""

    name = NAME
    method = METHOD
    space = NAME

    def load_of(self, settings: Mapping[str, KnobValue], job: Job) -> dict[str, KnobValue]:
        return {"command": fingerprint(job.workload.user_settings), "ranks": 1, "device": job.hardware.kind}

    def why_illegal(self, candidate: Candidate, job: Job) -> str | None:
        unknown = [name for name in placeholders(argv_of(job)) if candidate.settings.get(name) is None]
        return f"{{{unknown[0]}}} has no value." if unknown else None

    def baseline(self, space: SearchSpace, job: Job) -> Knobs:
        """The first value of each."""
        return {knob.name: job.workload.held.get(knob.name, knob.choices[0]) for knob in space.knobs}

    def launch(self, candidate: Candidate, job: Job, plan: ProbePlan | None = None) -> Launch:
        """The same command for a probe and for the final run: a probe is ended once enough was seen of it."""
        return Launch(
            argv=filled(argv_of(job), candidate.settings),
            figures=figures_of(job),
            environment=_environment(job),
            folder=str(job.workload.user_settings["folder"]),
        )


def argv_of(job: Job) -> tuple[str, ...]:
    return tuple(cast("Sequence[str]", job.workload.user_settings["command"]))


def figures_of(job: Job) -> Figures:
    """A file of JSON lines with `tokens_per_second`, or `tokens` and `seconds`; or lines that a pattern finds."""
    settings = job.workload.user_settings
    metrics, pattern = settings.get("metrics"), settings.get("speed_pattern")
    if metrics is not None:
        return Figures(kind="json", file=None if metrics == "-" else _beside(str(settings["folder"]), str(metrics)))
    return Figures(kind="pattern", line=str(pattern))


def _beside(folder: str, file: str) -> str:
    return file if file.startswith(OUT) else str(Path(folder) / file)


def _environment(job: Job) -> dict[str, str]:
    """Beside an interpreter that was named lie the programs of its environment: torchrun, accelerate, deepspeed."""
    if not job.workload.user_settings.get("python_named"):
        return {}
    return {"PATH": os.pathsep.join([str(job.workload.python.parent), os.environ.get("PATH", os.defpath)])}


TRAINERS = (Command(),)
