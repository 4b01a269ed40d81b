"""Any training command: its placeholders are the knobs.

Memory is measured from outside, an out-of-memory error is recognised by exit status and log,
and speed is read from the command's own output. Prediction and legality rules are impossible.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from autotune.core.job import Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, Knobs, KnobValue, SearchSpace, fingerprint
from autotune.frameworks.base import ANY_COMMAND, as_word
from autotune.frameworks.launched_run import OUT, Figures, Launch, Launched

METHOD = "training"
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
WRITTEN_OUT = "{out}"  # placeholder of the user for the run's own folder, which autotune fills in


def placeholders(argv: Sequence[str]) -> tuple[str, ...]:
    """Return the names in braces in order. Other braces, as in JSON, belong to the command."""
    names = dict.fromkeys(name for word in argv for name in _PLACEHOLDER.findall(word))
    names.pop(WRITTEN_OUT.strip("{}"), None)
    return tuple(names)


def filled(argv: Sequence[str], settings: Mapping[str, KnobValue]) -> tuple[str, ...]:
    """Return the command line with every placeholder replaced, and `{out}` by the one that the
    run replaces.
    """

    def value_of(placeholder: re.Match[str]) -> str:
        if placeholder[0] == WRITTEN_OUT:
            return OUT
        name = placeholder[1]
        return as_word(settings[name]) if name in settings else placeholder[0]

    return tuple(_PLACEHOLDER.sub(value_of, word) for word in argv)


class Command(Launched):
    """Command line of the user."""

    name = ANY_COMMAND
    method = METHOD
    space = ANY_COMMAND

    def load_of(self, settings: Mapping[str, KnobValue], task: Task) -> dict[str, KnobValue]:
        return {
            "command": fingerprint(task.workload.user_settings),
            "ranks": 1,
            "device": task.hardware.kind,
        }

    def why_illegal(self, candidate: Candidate, task: Task) -> str | None:
        for name in placeholders(argv_of(task)):
            if candidate.settings.get(name) is None:
                return f"{{{name}}} has no value."
        return None

    def baseline(self, space: SearchSpace, task: Task) -> Knobs:
        """Return the first value of each knob."""
        knobs = {knob.name: knob.choices[0] for knob in space.knobs}
        for name, value in task.workload.held_values.items():
            if name in knobs:
                knobs[name] = value
        return knobs

    def launch(
        self,
        candidate: Candidate,
        task: Task,
        plan: ProbePlan | None = None,
    ) -> Launch:
        """Return the same command for a probe and for the final run. The runner ends a probe."""
        user_settings = task.workload.user_settings
        environment = {}
        if user_settings.get("python_named"):
            # The interpreter's folder comes first: it contains torchrun, accelerate and deepspeed.
            folder = str(task.workload.python.parent)
            path = os.environ.get("PATH", os.defpath)
            environment["PATH"] = os.pathsep.join([folder, path])
        return Launch(
            argv=filled(argv_of(task), candidate.settings),
            figures=figures_of(task),
            environment=environment,
            folder=str(user_settings["folder"]),
        )


def argv_of(task: Task) -> tuple[str, ...]:
    return tuple(cast("Sequence[str]", task.workload.user_settings["command"]))


def figures_of(task: Task) -> Figures:
    """Return the speed source: JSON lines (`tokens_per_second`, or `tokens` and `seconds`), or a
    pattern.
    """
    settings = task.workload.user_settings
    metrics = settings.get("metrics")
    if metrics is None:
        return Figures(kind="pattern", line=str(settings.get("speed_pattern")))
    if metrics == "-":
        return Figures(kind="json")
    file = str(metrics)
    if file.startswith(WRITTEN_OUT):
        file = file.replace(WRITTEN_OUT, OUT, 1)
    if not file.startswith(OUT):
        file = str(Path(str(settings["folder"])) / file)
    return Figures(kind="json", file=file)


TRAINERS = (Command(),)
