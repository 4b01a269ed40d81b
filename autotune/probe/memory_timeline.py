"""Memory over the time of one command, in bounded intervals: exact peaks at rounded times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.core.measurement import MemorySample, Phase

MAX_INTERVALS = 48  # Beyond it, neighbouring intervals are merged and their width doubles
FIRST_INTERVAL_SECONDS = 0.1


class Timeline:
    """Peak of each interval, with the phase of that peak."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._started, self._width = self._clock(), FIRST_INTERVAL_SECONDS
        self._intervals: dict[int, tuple[int, Phase | None]] = {}

    def take(self, used_bytes: int, phase: Phase | None) -> None:
        while (number := int((self._clock() - self._started) / self._width)) >= MAX_INTERVALS:
            self._halve()
        self._raise_to(number, used_bytes, phase)

    def moments(self) -> tuple[MemorySample, ...]:
        return tuple(
            MemorySample(seconds=round((number + 1) * self._width, 3), peak_bytes=used, phase=phase)
            for number, (used, phase) in sorted(self._intervals.items())
        )

    def _halve(self) -> None:
        finer, self._intervals = self._intervals, {}
        self._width *= 2
        for number, (used, phase) in finer.items():
            self._raise_to(number // 2, used, phase)

    def _raise_to(self, number: int, used_bytes: int, phase: Phase | None) -> None:
        known = self._intervals.get(number)
        if known is None or used_bytes >= known[0]:
            self._intervals[number] = (used_bytes, phase)


def concatenated(first: Sequence[MemorySample], then: Sequence[MemorySample], later_seconds: float) -> tuple[MemorySample, ...]:
    """Join the timelines of two commands; the second began `later_seconds` after the first."""
    return (*first, *(replace(sample, seconds=round(later_seconds + sample.seconds, 3)) for sample in then))
