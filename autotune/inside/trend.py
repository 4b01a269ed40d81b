"""Foresight: stop a probe once its memory must cross the limit, before it does.

Where the work ahead is known (tokens still to generate, layers still to run) and memory grows with
it, the end can be told from the first quarter. Only what must happen counts: the slowest growth
seen lately is assumed to go on, and what is freed or reused makes the forecast smaller, never larger.
"""

from __future__ import annotations

from collections.abc import Callable

EARLIEST_SHARE = 0.25
"""Share of the work that must be done before anything is foretold."""

LOOKS = 32
"""How often at most memory is read over one stretch of work."""

RECENT = 3
"""How many of the latest gaps between readings the slope is taken from, the smallest of them."""


class LimitForeseen(MemoryError):
    """Memory is bound to cross the limit before the work at hand is done."""


class Trend:
    """One stretch of known work at a time: `begin` it, then tell how much is done."""

    def __init__(self, limit_bytes: int | None, read_bytes: Callable[[], int]) -> None:
        self._limit = limit_bytes
        self._read = read_bytes
        self._points: list[tuple[int, int]] = []
        self._next_look = 0

    def begin(self) -> None:
        """New work begins; what was seen before says nothing about it."""
        self._points = []
        self._next_look = 0

    def progress(self, done: int, total: int, what: str) -> None:
        """`done` of `total` is done. Raises LimitForeseen when the rest cannot fit any more."""
        if self._limit is None or done < self._next_look or done >= total:
            return
        self._next_look = done + max(1, total // LOOKS)
        held = self._read()
        self._points.append((done, held))
        if held > self._limit:
            raise LimitForeseen(f"at {what} {done} of {total} memory is {held} bytes, over the limit of {self._limit} bytes")
        if done >= total * EARLIEST_SHARE and len(self._points) > RECENT:
            self._judge(total, what)

    def _judge(self, total: int, what: str) -> None:
        done, held = self._points[-1]
        slope = self._smallest_recent_slope()
        reached = held + int(slope * (total - done))
        if slope > 0 and self._limit is not None and reached > self._limit:
            raise LimitForeseen(
                f"at {what} {done} of {total} memory is {held} bytes and grows by {int(slope)} bytes a {what}: "
                f"it reaches {reached} bytes, over the limit of {self._limit} bytes"
            )

    def _smallest_recent_slope(self) -> float:
        # Growth comes in steps (pages, arenas): each slope spans from a recent reading to the last, one from half of the way.
        done, held = self._points[-1]
        since = [*self._points[-1 - RECENT : -1], self._points[len(self._points) // 2 - 1]]
        return min((held - before) / (done - at) for at, before in since)
