"""An executor that measures by calling a function in this process: for simulations, replays and tests."""

from __future__ import annotations

from collections.abc import Callable

from autotune.candidate import Candidate
from autotune.errors import RigError
from autotune.measurement import Measurement
from autotune.trainers.base import ProbePlan

Measure = Callable[[Candidate, ProbePlan], Measurement]


class InlineRig:
    """Counts its one load at the first measure."""

    def __init__(self, load_key: str, measure: Measure, on_load: Callable[[], None]) -> None:
        self.load_key = load_key
        self._measure, self._on_load = measure, on_load
        self._loaded = self._closed = False

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        if candidate.load_key != self.load_key:
            raise RigError(f"Candidate {candidate.id} needs load {candidate.load_key}; this rig has {self.load_key}.")
        if self._closed or not self._loaded:
            self._loaded, self._closed = True, False
            self._on_load()
        return self._measure(candidate, plan)

    def close(self) -> None:
        self._closed = True


class InlineExecutor:
    """One slot, like the local one."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._rig: InlineRig | None = None
        self._loads = 0

    def open(self, candidate: Candidate) -> InlineRig:
        if self._rig is None or self._rig.load_key != candidate.load_key:
            self.close()
            self._rig = InlineRig(candidate.load_key, self._measure, self._count)
        return self._rig

    @property
    def loads(self) -> int:
        return self._loads

    def close(self) -> None:
        rig, self._rig = self._rig, None
        if rig is not None:
            rig.close()

    def _count(self) -> None:
        self._loads += 1
