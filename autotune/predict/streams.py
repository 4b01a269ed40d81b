"""Several streams, one allocator: which stream each allocation belongs to, and when what another stream read comes back.

torch keeps a pool of blocks per stream. What is given back while another stream may still read it (`record_stream`) is not
allocated any more, but serves nobody until that stream has passed. How far the device is behind is decided by where the
process waits for it; the trace says before which allocation that is.
"""

from __future__ import annotations

from collections import defaultdict

from autotune.predict.allocator import AllocatorSettings, CachingAllocator
from autotune.trace import Trace


class OnStreams(CachingAllocator):
    """The allocator of a trace that runs on several streams; looks like one for a single stream."""

    def __init__(self, trace: Trace, settings: AllocatorSettings | None = None, *, capacity_bytes: int | None = None) -> None:
        super().__init__(settings, capacity_bytes=capacity_bytes)
        self._streams, self._returns = trace.streams, trace.returns
        self._due: dict[int, list[int]] = defaultdict(list)
        for number, before in trace.returns.items():
            self._due[before].append(number)

    def malloc(self, number: int, size: int, stream: int = 0) -> None:
        """Request bytes of the stream that this allocation belongs to."""
        for returned in self._due.get(number, ()):
            self.comes_back(returned)
        super().malloc(number, size, self._streams.get(number, stream))

    def free(self, number: int) -> None:
        """Give it back, at once or once the other stream has passed."""
        if number in self._returns:
            self.let_go(number)
        else:
            super().free(number)
