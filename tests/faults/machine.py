"""The space that is searched while something goes wrong: six candidates, two loads, and a truth
that is known exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.core.job import Job, Task
from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate, Knob, Knobs, SearchSpace
from tests.faults.adapter import CYCLE_SECONDS
from tests.simulated import MIB, ToyTrainer, toy_job

LIMIT_MIB = 256
PROBE_SECONDS = 0.06

SPACE = SearchSpace(
    name="faults",
    about="a space for trouble",
    method="grpo",
    framework="trl",
    objective="preference",
    relax=(),
    knobs=(
        Knob(
            name="number",
            choices=(1, 2, 3),
            effect="neutral",
            memory="unclear",
            says="which",
        ),
        Knob(
            name="engine",
            choices=(False, True),
            effect="neutral",
            memory="unclear",
            says="another load",
        ),
    ),
)


def tokens_of(knobs: Knobs) -> int:
    """Completion tokens of a cycle."""
    return 100 * int(knobs["number"]) + (50 if knobs["engine"] else 0)  # type: ignore[arg-type]


def speed_of(knobs: Knobs) -> float:
    return tokens_of(knobs) / CYCLE_SECONDS


class Trainer(ToyTrainer):
    """Words requests for the adapter of this folder."""

    def __init__(self, folder: Path, trouble: Mapping[str, object] | None) -> None:
        self._folder, self._trouble = folder, trouble

    def complete(self, knobs: Knobs, task: Task) -> Candidate:
        return Candidate(
            knobs=knobs,
            settings=dict(knobs),
            load={"engine": knobs["engine"]},
        )

    def baseline(self, space: SearchSpace, task: Task) -> Knobs:
        return {"number": 1, "engine": False}

    def load_request(self, candidate: Candidate, task: Task) -> Mapping[str, object]:
        return {"script": [], "gloo": (self._trouble or {}).get("name") == "hang in a collective"}

    def probe_request(
        self,
        candidate: Candidate,
        task: Task,
        plan: ProbePlan,
    ) -> Mapping[str, object]:
        half = {"do": "sleep", "seconds": PROBE_SECONDS / 2}
        return {
            "script": [
                {"do": "phase", "name": "rollout"},
                half,
                {"do": "phase", "name": "backward"},
                half,
            ],
            "candidate": candidate.id,
            "tokens": tokens_of(candidate.knobs),
            "cycles": plan.timed_cycles,
            "folder": str(self._folder),
            "trouble": self._trouble,
        }


def job(
    folder: Path,
    storage: str,
    *,
    resume: bool,
) -> Job:
    return toy_job(
        folder,
        SPACE,
        LIMIT_MIB * MIB,
        storage=storage,
        study_name=folder.name,
        resume=resume,
        budget_seconds=120.0,
    )
