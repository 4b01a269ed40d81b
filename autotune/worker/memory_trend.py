"""Early stop of a probe whose memory has to cross the limit.

Where the remaining work is known (tokens to generate, layers to run) and memory grows with it, a
quarter of the work is enough to extrapolate. The slowest recent growth is assumed to continue;
freed or reused memory makes the estimate smaller, never larger.
"""

from __future__ import annotations

from collections.abc import Callable

MIN_DONE_SHARE = 0.25  # share of the work before the first extrapolation
MAX_READINGS = 32  # memory readings over one stretch of work
RECENT_READINGS = 3  # number of recent readings whose slopes are compared; the smallest counts


class LimitForeseen(MemoryError):
    """Memory will cross the limit before the current work is done."""


class Trend:
    """Extrapolation over one stretch of known work at a time."""

    def __init__(self, limit_bytes: int | None, read_bytes: Callable[[], int]) -> None:
        self._limit, self._read = limit_bytes, read_bytes
        self.begin()

    def begin(self) -> None:
        """Start a new stretch of work, without the earlier readings."""
        self._points: list[tuple[int, int]] = []
        self._next_reading = 0

    def progress(self, done: int, total: int, what: str) -> None:
        """Record `done` of `total`. Raise LimitForeseen if the rest cannot fit."""
        limit = self._limit
        if limit is None or done < self._next_reading or done >= total:
            return
        self._next_reading = done + max(1, total // MAX_READINGS)
        held = self._read()
        self._points.append((done, held))
        at = f"at {what} {done} of {total} memory is {held} bytes"
        if held > limit:
            raise LimitForeseen(f"{at}, over the limit of {limit} bytes")
        if done < total * MIN_DONE_SHARE or len(self._points) <= RECENT_READINGS:
            return
        slope = self._slope()
        end = held + int(slope * (total - done))
        if slope > 0 and end > limit:
            raise LimitForeseen(
                f"{at} and grows by {int(slope)} bytes a {what}: it reaches {end} bytes, over the limit of {limit} bytes"
            )

    def _slope(self) -> float:
        """Smallest growth per unit of work since recent readings and one halfway back."""
        # Growth comes in steps (pages, arenas), hence slopes over several distances.
        done, held = self._points[-1]
        since = [*self._points[-1 - RECENT_READINGS : -1], self._points[len(self._points) // 2 - 1]]
        return min((held - before) / (done - at) for at, before in since)
