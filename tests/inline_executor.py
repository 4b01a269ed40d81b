"""Executor that calls a function in this process: for simulations, replays and tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from autotune.core.errors import ProbeError
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate
from autotune.probe.executors.base import Slot

Measure = Callable[[Candidate, ProbePlan], Measurement]


class InlineRunner:
    """Counts a load at the first measurement, and at the first one after `close`."""

    def __init__(
        self,
        load_key: str,
        measure: Measure,
        on_load: Callable[[], object],
    ) -> None:
        self.load_key = load_key
        self._measure, self._on_load, self._loaded = measure, on_load, False

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        if candidate.load_key != self.load_key:
            raise ProbeError(
                f"Candidate {candidate.id} needs load {candidate.load_key}; this runner has"
                f" {self.load_key}."
            )
        if not self._loaded:
            self._loaded = True
            self._on_load()
        return self._measure(candidate, plan)

    def close(self) -> None:
        self._loaded = False


class InlineExecutor:
    """Any number of slots; with several, the function must be thread-safe."""

    def __init__(self, measure: Measure, slots: int = 1) -> None:
        self._measure = measure
        self._runners: dict[int, InlineRunner] = {}
        self._numbers = itertools.count(1)
        self._loads = 0
        self.slots = tuple(
            Slot(
                number=n,
                hosts=frozenset({"inline"}),
                label="this process",
            )
            for n in range(slots)
        )

    def prepare(self) -> Mapping[str, str]:
        return {}

    def open(self, candidate: Candidate, slot: int = 0) -> InlineRunner:
        runner = self._runners.get(slot)
        if runner is None or runner.load_key != candidate.load_key:
            runner = self._runners[slot] = InlineRunner(
                candidate.load_key, self._measure, self._count_load
            )
        return runner

    @property
    def loads(self) -> int:
        return self._loads

    def interrupt(self) -> None:
        """Do nothing: a function cannot be interrupted from another thread."""

    def close(self) -> None:
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()

    def _count_load(self) -> None:
        self._loads = next(self._numbers)  # atomic: two threads never draw the same number
