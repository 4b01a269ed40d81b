"""Whether the margin will last: the peak so far against the limit, and how it grew with steps and with longer completions.

The trend is that of a soak (Sen's slope with its interval), and only growth beyond doubt is carried on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autotune.integrations.gauges import Reading
from autotune.measurement import Cycle
from autotune.soak import Growth, growth_of
from autotune.units import format_bytes

NARROW = (0.1, 0.05, 0.02)
"""Shares of the limit; each is told once, when the margin falls below it."""

SETTLING = 2
"""Steps left out: buffers, caches and the optimizer's state appear in the first ones."""

MOST_POINTS = 64
"""Every second one is dropped when there are more: the trend is over the whole run, in bounded time."""


@dataclass
class Margin:
    """One rank's margin over a run. `look` returns what is worth a warning, each kind of it once."""

    last_step: int | None
    """Of the run; None where that is not known."""

    longest: int | None
    """How long completions may become; None where that is not known."""

    by_step: list[Cycle] = field(default_factory=list)
    by_length: list[Cycle] = field(default_factory=list)
    _told: set[str] = field(default_factory=set)
    _every: int = 1

    def look(self, step: int, reading: Reading, length: int | None = None) -> list[str]:
        """After a step; `length` is the longest completion since the last look, where that is known."""
        if step > SETTLING and step % self._every == 0:
            self._remember(step, reading, length)
        found = [self._narrow(reading), self._by_steps(step, reading), self._by_length(reading)]
        new = {kind: said for kind, said in filter(None, found) if kind not in self._told}
        self._told |= set(new)
        return list(new.values())

    def _remember(self, step: int, reading: Reading, length: int | None) -> None:
        self.by_step.append(_point(step, reading))
        if len(self.by_step) > MOST_POINTS:
            self.by_step, self._every = self.by_step[::2], self._every * 2
        if length is not None and length > (self.by_length[-1].steps if self.by_length else 0):
            self.by_length.append(_point(length, reading))
            self.by_length = self.by_length[-MOST_POINTS:]

    def _narrow(self, reading: Reading) -> tuple[str, str] | None:
        below = [share for share in NARROW if reading.margin_bytes < share * reading.limit_bytes]
        if not below:
            return None
        return (
            f"below {min(below)}",
            f"{format_bytes(max(0, reading.margin_bytes))} left of {format_bytes(reading.limit_bytes)}, {reading.by}",
        )

    def _by_steps(self, step: int, reading: Reading) -> tuple[str, str] | None:
        growth = growth_of(self.by_step)
        if growth is None or not growth.is_certain or self.last_step is None:
            return None
        until = step + math.floor(reading.margin_bytes / growth.low)
        if until >= self.last_step:
            return None
        return "steps", (
            f"the peak grows by {_grows(growth)} a step and reaches the limit of {format_bytes(reading.limit_bytes)} "
            f"after step {until} at the latest; the run takes {self.last_step}"
        )

    def _by_length(self, reading: Reading) -> tuple[str, str] | None:
        growth = growth_of(self.by_length)
        if growth is None or not growth.is_certain or self.longest is None:
            return None
        seen = self.by_length[-1].steps
        needed = reading.peak_bytes + round(growth.low * max(0, self.longest - seen))
        if needed <= reading.limit_bytes:
            return None
        return "length", (
            f"the peak grows by {_grows(growth)} for each token that the longest completion gets longer: with the allowed "
            f"{self.longest} ({seen} so far) it is at least {format_bytes(needed)} of {format_bytes(reading.limit_bytes)}"
        )


def _point(at: int, reading: Reading) -> Cycle:
    return Cycle(steps=at, seconds=0.0, peak_bytes=reading.peak_bytes, held_bytes=reading.peak_bytes)


def _grows(growth: Growth) -> str:
    return f"{format_bytes(round(growth.bytes_per_step))} (at least {format_bytes(round(growth.low))})"
