"""Memory of one rank and its nearest limit.

Counters of the user's process are only read, never reset: torch's peak and the kernel's high-water
mark cover the whole run.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from autotune.core.units import KIB
from autotune.machine.hardware_detection import machine_memory_bytes


@dataclass(frozen=True, kw_only=True)
class GaugeReading:
    """Peak so far with the nearest limit."""

    peak_bytes: int
    limit_bytes: int
    by: str  # name of the limit
    outside_bytes: int | None = None  # contexts, NCCL, engines, other processes; None on a CPU

    @property
    def margin_bytes(self) -> int:
        return self.limit_bytes - self.peak_bytes


class CudaGauge:
    """GPU memory: torch's peak of reserved bytes plus current device memory outside torch.

    With vLLM's sleep mode in this process torch counts offloaded memory as reserved. Only the
    device's used bytes are read in that case.
    """

    def __init__(self, torch: Any, device: Any, *, sleeps: bool) -> None:
        self._cuda, self._device, self._sleeps = torch.cuda, device, sleeps
        self._peak = 0

    def read(self) -> GaugeReading:
        free, total = self._cuda.mem_get_info(self._device)
        used = int(total) - int(free)
        reserved = int(self._cuda.memory_reserved(self._device))
        outside = None if self._sleeps else max(0, used - reserved)
        peak = used if outside is None else int(self._cuda.max_memory_reserved(self._device)) + outside
        self._peak = max(self._peak, peak)
        return GaugeReading(peak_bytes=self._peak, limit_bytes=int(total), by=f"GPU {self._device}", outside_bytes=outside)


class CpuGauge:
    """Host memory of this process and its children.

    Limits: the memory of the machine or container, and RLIMIT_DATA of this process.
    """

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._peaks: dict[str, int] = {}

    def read(self) -> GaugeReading:
        own = _status(Path("/proc/self/status"))
        # VmHWM includes file pages; the currently mapped ones were mapped at the peak, too.
        peak = max(_resident(own), own.get("VmHWM", 0) - own.get("RssFile", 0))
        children = self._self.children(recursive=True)  # data loader workers, engine processes
        peak += sum(_resident(_status(Path(f"/proc/{child.pid}/status"))) for child in children)
        readings = [self._peak_of(peak, machine_memory_bytes(), "the machine's memory")]
        data_limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if data_limit != resource.RLIM_INFINITY and "VmData" in own:
            readings.append(self._peak_of(own["VmData"], data_limit, "this process's limit on data (ulimit -d)"))
        return min(readings, key=lambda one: one.margin_bytes)

    def _peak_of(self, used: int, limit: int, by: str) -> GaugeReading:
        self._peaks[by] = max(self._peaks.get(by, 0), used)
        return GaugeReading(peak_bytes=self._peaks[by], limit_bytes=limit, by=by)


def _resident(status: dict[str, int]) -> int:
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def _status(file: Path) -> dict[str, int]:
    """Parse the sizes of /proc/PID/status into bytes; empty for a process that has ended."""
    try:
        lines = [line.split() for line in file.read_text().splitlines() if line.endswith(" kB")]
    except OSError:
        return {}
    return {words[0].rstrip(":"): int(words[1]) * KIB for words in lines}
