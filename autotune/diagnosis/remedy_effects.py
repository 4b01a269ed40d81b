"""Predicted effect of each remedy on memory and speed, where the configuration is given.

A direction becomes a value: the mildest one that surely fits, else the strongest. Nothing is
measured here, and what can't be predicted stays None.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.core.errors import AutotuneError
from autotune.core.job import Job
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, SearchSpace
from autotune.diagnosis.diagnosis import Advice, Diagnosis
from autotune.diagnosis.remedy_changes import Change, changes_of
from autotune.frameworks.base import Trainer
from autotune.prediction.service import PredictionService

SECONDS = 120.0  # time limit for predictions; the remaining remedies get no figure


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Predictor of the effects of changes to one configuration."""

    job: Job
    space: SearchSpace  # possible changes, before the configuration held any value
    trainer: Trainer
    service: PredictionService
    candidate: Candidate  # configuration that failed
    now: Callable[[], float] = time.monotonic

    def on(self, diagnosis: Diagnosis) -> Diagnosis:
        """Return the diagnosis with the prediction for the configuration and for each remedy that has one."""
        before = self.service.predict(self.candidate)
        until = self.now() + SECONDS
        remedies = tuple(
            dataclasses.replace(advice, predicted=self._of(advice, before) if self.now() < until else None)
            for advice in diagnosis.remedies
        )
        return dataclasses.replace(diagnosis, remedies=remedies, configured=_figures(before))

    def _of(self, advice: Advice, before: Prediction) -> Mapping[str, Any] | None:
        """Return the mildest change in this direction that surely fits, or else the strongest."""
        best: tuple[Change, Prediction] | None = None
        for change in changes_of(advice, self.space, self.candidate):
            after = self._after(change)
            best = best if after is None else (change, after)
            if after is not None and after.fits:
                break
        if best is None:
            return None
        change, after = best
        learning = self.space.is_learning(change, self.candidate.settings)
        speeds = before.tokens_per_second, after.tokens_per_second
        ratio = None if learning or speeds[0] is None or speeds[1] is None else speeds[1].value / speeds[0].value
        return {
            "change": dict(change),
            **_figures(after),
            "saved_bytes": round(before.peak_memory_bytes.value - after.peak_memory_bytes.value),
            "speed_ratio": None if ratio is None else round(ratio, 3),
            "changes_what_is_learned": learning,
        }

    def _after(self, change: Change) -> Prediction | None:
        knobs = self.space.with_remedies({**self.candidate.knobs, **change})
        try:
            other = self.trainer.complete(knobs, self.job.task)
            if other == self.candidate or self.trainer.why_illegal(other, self.job.task) is not None:
                return None
            return self.service.predict(other)
        except AutotuneError:
            return None  # the other remedies may still be predicted


def _figures(prediction: Prediction) -> dict[str, Any]:
    """Return the same fields as `predict --json`."""
    figures = {name: getattr(prediction, name) for name in ("peak_memory_bytes", "margin_bytes", "tokens_per_second")}
    return {
        "basis": prediction.basis,
        "fits": prediction.fits,
        **{name: one and {end: round(getattr(one, end)) for end in ("value", "low", "high")} for name, one in figures.items()},
    }
