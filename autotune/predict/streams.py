"""Two streams, two pools: torch's allocator never hands a block of one stream to another.

FSDP1 gathers parameters on a stream of its own. A buffer given back there waits, by `record_stream`, until the computation that
read it has passed; with the rate limiter on, as it is by default, at most two wait at a time
(torch/distributed/fsdp/_limiter_utils.py).
"""

from __future__ import annotations

from collections import deque

from autotune.predict.allocator import AllocatorSettings, CachingAllocator
from autotune.trace import Trace

IN_FLIGHT = 2
"""Gathered buffers that wait for their event."""

SMALLEST = 1 << 20
"""Bytes from which a buffer counts as a gathered one; smaller ones are small pool, and come free at once."""


class GatheringApart:
    """The computing stream's allocator, and the gathering stream's beside it; looks like one."""

    def __init__(self, trace: Trace, settings: AllocatorSettings | None = None, *, capacity_bytes: int | None = None) -> None:
        communication = trace.part_names.index("communication")
        self._apart = frozenset(number for number, part in enumerate(trace.parts) if part == communication)
        self._sizes = trace.sizes
        self._computing = CachingAllocator(settings)
        self._gathering = CachingAllocator(settings)
        self._capacity_bytes = capacity_bytes
        self._waiting: deque[int] = deque()
        self._waiting_bytes = 0

    def malloc(self, number: int, size: int) -> None:
        """Request bytes of the stream that this allocation belongs to."""
        ours, other = self._of(number)
        if self._capacity_bytes is not None:
            ours.capacity_bytes = self._capacity_bytes - other.reserved
        ours.malloc(number, size)

    def free(self, number: int) -> None:
        """Give it back, on the gathering stream once others came after it."""
        if number not in self._apart or self._sizes[number] < SMALLEST:
            self._of(number)[0].free(number)
            return
        self._waiting.append(number)
        self._waiting_bytes += self._sizes[number]
        while len(self._waiting) > IN_FLIGHT:
            done = self._waiting.popleft()
            self._waiting_bytes -= self._sizes[done]
            self._gathering.free(done)

    def empty_cache(self) -> None:
        """Emptying waits for every event first."""
        while self._waiting:
            self._gathering.free(self._waiting.popleft())
        self._waiting_bytes = 0
        self._computing.empty_cache()
        self._gathering.empty_cache()

    @property
    def allocated(self) -> int:
        """What waits is not counted as allocated any more."""
        return self._computing.allocated + self._gathering.allocated - self._waiting_bytes

    @property
    def requested(self) -> int:
        return self._computing.requested + self._gathering.requested - self._waiting_bytes

    @property
    def reserved(self) -> int:
        return self._computing.reserved + self._gathering.reserved

    @property
    def retries(self) -> int:
        return self._computing.retries + self._gathering.retries

    def _of(self, number: int) -> tuple[CachingAllocator, CachingAllocator]:
        return (self._gathering, self._computing) if number in self._apart else (self._computing, self._gathering)
