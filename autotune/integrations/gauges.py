"""How much memory one rank holds, and of which limit: the one that is nearest.

Nothing of the user's is reset: torch's peak and the kernel's high-water mark are read as they stand, from the run's beginning.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from autotune.detect import machine_memory_bytes

KIB = 1024


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The most that was held so far, of the limit that is nearest."""

    peak_bytes: int
    limit_bytes: int
    by: str
    """What limits it, in words."""

    outside_bytes: int | None = None
    """Of a GPU's peak, what lies outside of torch: contexts, NCCL, an engine's pool, other processes. None on a CPU."""

    @property
    def margin_bytes(self) -> int:
        return self.limit_bytes - self.peak_bytes


class Gauge(Protocol):
    """One rank's memory."""

    def read(self) -> Reading: ...


class CudaGauge:
    """A GPU: the most that torch reserved, and what the device shows beyond torch.

    Where vLLM sleeps in this process, torch counts what sleeps as reserved, so only what the device shows is taken.
    """

    def __init__(self, torch: Any, device: Any, *, sleeps: bool) -> None:
        self._cuda, self._device, self._sleeps = torch.cuda, device, sleeps
        self._seen = 0

    def read(self) -> Reading:
        free, total = self._cuda.mem_get_info(self._device)
        used = int(total) - int(free)
        reserved = int(self._cuda.memory_reserved(self._device))
        outside = None if self._sleeps else max(0, used - reserved)
        peak = used if outside is None else int(self._cuda.max_memory_reserved(self._device)) + outside
        self._seen = max(self._seen, peak)
        return Reading(peak_bytes=self._seen, limit_bytes=int(total), by=f"GPU {self._device}", outside_bytes=outside)


class CpuGauge:
    """A machine: this process and those it started, against the machine's or the container's memory and this process's own
    limit on what it may map."""

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._peaks: dict[str, int] = {}

    def read(self) -> Reading:
        return min(self._readings(), key=lambda one: one.margin_bytes)

    def _readings(self) -> Iterator[Reading]:
        own = _status(Path("/proc/self/status"))
        # The mark counts file pages too; what is mapped now was mapped then.
        peak = max(_held(own), own.get("VmHWM", 0) - own.get("RssFile", 0))
        yield self._most(peak + self._children(), machine_memory_bytes(), "the machine's memory")
        may_map = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if may_map != resource.RLIM_INFINITY and "VmData" in own:
            yield self._most(own["VmData"], may_map, "this process's limit on data (ulimit -d)")

    def _most(self, held: int, limit: int, by: str) -> Reading:
        self._peaks[by] = max(self._peaks.get(by, 0), held)
        return Reading(peak_bytes=self._peaks[by], limit_bytes=limit, by=by)

    def _children(self) -> int:
        """Loaders' workers, an engine's processes: what they hold now."""
        return sum(_held(_status(Path(f"/proc/{child.pid}/status"))) for child in self._self.children(recursive=True))


def _held(status: dict[str, int]) -> int:
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _status(file: Path) -> dict[str, int]:
    """Sizes in bytes; nothing of a process that has ended meanwhile."""
    try:
        lines = [line.split() for line in file.read_text().splitlines() if line.endswith(" kB")]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in lines}
