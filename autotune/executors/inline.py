"""An executor that measures by calling a function in this process: for simulations, replays and tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from autotune.candidate import Candidate
from autotune.errors import RigError
from autotune.executors.base import Slot
from autotune.measurement import Measurement
from autotune.trainers.base import ProbePlan

Measure = Callable[[Candidate, ProbePlan], Measurement]

HERE = frozenset({"inline"})


class InlineRig:
    """Counts its one load at the first measure."""

    def __init__(self, load_key: str, measure: Measure, on_load: Callable[[], object]) -> None:
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
    """As many slots as are wanted; a function that several threads may call at once then measures."""

    def __init__(self, measure: Measure, slots: int = 1) -> None:
        self._measure = measure
        self._rigs: dict[int, InlineRig] = {}
        self._numbers = itertools.count(1)
        self._loads = 0
        self.slots = tuple(Slot(number=number, hosts=HERE, words="this process") for number in range(slots))

    def prepare(self) -> Mapping[str, str]:
        return {}

    def open(self, candidate: Candidate, slot: int = 0) -> InlineRig:
        rig = self._rigs.get(slot)
        if rig is None or rig.load_key != candidate.load_key:
            rig = self._rigs[slot] = InlineRig(candidate.load_key, self._measure, self._count)
        return rig

    @property
    def loads(self) -> int:
        return self._loads

    def interrupt(self) -> None:
        """A function can't be interrupted from another thread: what it returns is not waited for."""

    def close(self) -> None:
        for rig in self._rigs.values():
            rig.close()
        self._rigs.clear()

    def _count(self) -> None:
        self._loads = next(self._numbers)  # two threads never draw the same number
