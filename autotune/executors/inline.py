"""Probes in this very process, by a function: for tests, simulations and recorded measurements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from autotune.candidate import Candidate
from autotune.measurement import Measurement
from autotune.trainers.base import ProbePlan

Measure = Callable[[Candidate, ProbePlan], Measurement]


@dataclass
class InlineRig:
    """A rig whose measuring is a function call."""

    load_key: str
    measure_with: Measure

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        return self.measure_with(candidate, plan)

    def close(self) -> None:
        """Nothing to end."""


@dataclass
class InlineExecutor:
    """One slot, in this process."""

    measure: Measure
    loads: int = field(default=0, init=False)
    _live: InlineRig | None = field(default=None, init=False)

    def open(self, candidate: Candidate) -> InlineRig:
        if self._live is None or self._live.load_key != candidate.load_key:
            self._live = InlineRig(load_key=candidate.load_key, measure_with=self.measure)
            self.loads += 1
        return self._live

    def close(self) -> None:
        self._live = None
