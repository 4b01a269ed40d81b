"""FSDP1's rate limiter: how far the process runs ahead of the device, and so when blocks that other streams read come back."""

from __future__ import annotations

from collections import deque

from autotune.predict.sharding.book import Writer

IN_FLIGHT = 2
"""Gathered units that may wait to be freed before the process waits for the device: torch/distributed/fsdp/_limiter_utils.py."""


class Limiter:
    """`limit_all_gathers`, on by default, and with it how far the process runs ahead of the device.

    What another stream reads is given back with `record_stream`: its block serves nobody until the device has come that far.
    The process notes an event whenever a gathered unit is cut again, and waits for the oldest before it gathers the next one.
    """

    def __init__(self, book: Writer, *, on_streams: bool) -> None:
        self._book, self._on_streams = book, on_streams
        self._pending: deque[tuple[int, int]] = deque()
        self._events: deque[int] = deque()
        self._given_back = 0

    def give_back(self, number: int | None) -> None:
        """Free what another stream still reads."""
        self._book.free(number)
        if number is not None and self._on_streams:
            self._pending.append((self._given_back, number))
            self._given_back += 1

    def note(self) -> None:
        """An event: the device has passed it when all before it is done."""
        self._events.append(self._given_back)

    def before_gathering(self) -> None:
        """Wait for the oldest event where enough are under way."""
        if len(self._events) >= IN_FLIGHT:
            self.next()

    def next(self) -> None:
        """The oldest event has come."""
        if self._events:
            self._passed(self._events.popleft())

    def wait(self) -> None:
        """The process waits for the device altogether, as it does when it looks at a loss or a norm."""
        self._passed(self._given_back)
        self._events.clear()

    def _passed(self, until: int) -> None:
        done = []
        while self._pending and self._pending[0][0] < until:
            done.append(self._pending.popleft()[1])
        self._book.returned(done)
