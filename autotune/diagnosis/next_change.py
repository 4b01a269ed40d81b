"""Next smaller configuration after memory ran out, from the remedies of the failure table alone:
without a prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from autotune.core.job import Task
from autotune.core.space import Candidate, SearchSpace
from autotune.diagnosis.diagnosis import Diagnosis
from autotune.diagnosis.remedies import RemedyChange, advice_for, changes_of
from autotune.frameworks.base import Trainer

# Causes whose remedies are tried when those of the diagnosed cause are exhausted
LAST_RESORT = (
    "activations",
    "unknown_memory",
)


@dataclass(frozen=True, kw_only=True)
class Next:
    """Next smaller configuration."""

    change: RemedyChange
    learning: bool  # changes what is learned
    candidate: Candidate


def smaller_configurations(
    trainer: Trainer,
    task: Task,
    space: SearchSpace,
    candidate: Candidate,
    diagnosis: Diagnosis,
) -> Iterator[Next]:
    """Yield the legal changes in the order of the advice, mildest first of each kind."""
    advice = list(diagnosis.remedies)
    for cause in LAST_RESORT:
        advice += advice_for(dataclasses.replace(diagnosis, cause=cause, row=None))
    for advised in advice:
        for change in changes_of(advised, space, candidate):
            changed = trainer.complete(space.with_remedies({**candidate.knobs, **change}), task)
            if changed != candidate and trainer.why_illegal(changed, task) is None:
                yield Next(
                    change=change,
                    learning=space.is_learning(change, candidate.settings),
                    candidate=changed,
                )


def smaller_configuration(
    trainer: Trainer,
    task: Task,
    space: SearchSpace,
    candidate: Candidate,
    diagnosis: Diagnosis,
) -> Next | None:
    """Return the first of these; neutral changes first."""
    possible = smaller_configurations(trainer, task, space, candidate, diagnosis)
    return min(possible, key=lambda following: following.learning, default=None)
