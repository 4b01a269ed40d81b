"""Memory over the time of one command, in a bounded number of stretches, whatever it takes: no peak is lost, only when it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.measurement import Moment, Phase

MOST = 48
"""Stretches that are kept; when there are more, two become one and each new one is twice as long."""

FIRST_SECONDS = 0.1
"""How long a stretch is at first."""


class Timeline:
    """Takes samples as they come."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        self._started, self._width = self._clock(), FIRST_SECONDS
        self._stretches: dict[int, tuple[int, Phase | None]] = {}

    def take(self, used_bytes: int, phase: Phase | None) -> None:
        while (number := int((self._clock() - self._started) / self._width)) >= MOST:
            self._halve()
        self._raise_to(number, used_bytes, phase)

    def moments(self) -> tuple[Moment, ...]:
        return tuple(
            Moment(seconds=round((number + 1) * self._width, 3), peak_bytes=used, phase=phase)
            for number, (used, phase) in sorted(self._stretches.items())
        )

    def _halve(self) -> None:
        finer, self._stretches = self._stretches, {}
        self._width *= 2
        for number, (used, phase) in finer.items():
            self._raise_to(number // 2, used, phase)

    def _raise_to(self, number: int, used_bytes: int, phase: Phase | None) -> None:
        known = self._stretches.get(number)
        if known is None or used_bytes >= known[0]:
            self._stretches[number] = (used_bytes, phase)


def one_after_the_other(first: Sequence[Moment], then: Sequence[Moment], later_seconds: float) -> tuple[Moment, ...]:
    """Two commands of one probe, the second of which began so much later."""
    return (*first, *(replace(moment, seconds=round(later_seconds + moment.seconds, 3)) for moment in then))
