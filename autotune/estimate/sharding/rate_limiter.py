"""FSDP1's rate limiter: when freed blocks of other streams can be used again."""

from __future__ import annotations

from collections import deque

from autotune.estimate.sharding.rewriter import Writer

IN_FLIGHT = 2
"""Gathered units in flight before the process waits for the device (_limiter_utils.py)."""


class RateLimiter:
    """FSDP1's `limit_all_gathers`: the distance by which the process runs ahead of the device.

    A block that another stream reads is freed with `record_stream`: unusable until the device has
    passed that point. The process records an event whenever a gathered unit is resharded, and waits
    for the oldest event before it gathers the next unit.
    """

    def __init__(self, book: Writer, *, on_streams: bool) -> None:
        self._book, self._on_streams = book, on_streams
        self._pending: deque[tuple[int, int]] = deque()
        self._events: deque[int] = deque()
        self._freed = 0

    def free(self, number: int | None) -> None:
        """Free a block that another stream still reads."""
        self._book.free(number)
        if number is not None and self._on_streams:
            self._pending.append((self._freed, number))
            self._freed += 1

    def record_event(self) -> None:
        self._events.append(self._freed)

    def before_gathering(self) -> None:
        if len(self._events) >= IN_FLIGHT:
            self.wait_for_oldest()

    def wait_for_oldest(self) -> None:
        if self._events:
            self._passed(self._events.popleft())

    def synchronise(self) -> None:
        """Wait for the whole device, as reading a loss or a norm does."""
        self._passed(self._freed)
        self._events.clear()

    def _passed(self, until: int) -> None:
        done = []
        while self._pending and self._pending[0][0] < until:
            done.append(self._pending.popleft()[1])
        self._book.returned(done)
