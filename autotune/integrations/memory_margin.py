"""Memory of one rank, its nearest limit, and the trend towards it: over steps and over completion
length.

Counters of the user's process are only read, never reset: torch's peak and the kernel's high-water
mark cover the whole run. The trend is that of a soak (Sen's slope with its interval). Only certain
growth is extrapolated.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass, field
from typing import Any

import psutil

from autotune.core.measurement import CycleMemory
from autotune.core.memory_growth import SOAK_WARMUP_CYCLES, MemoryGrowth, growth_of, step_of_limit
from autotune.core.units import format_bytes
from autotune.integrations.phase_peaks import MemoryMoment
from autotune.machine.host_memory import machine_memory_bytes
from autotune.worker.process_memory import sizes_of_process, status


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

    def __init__(
        self,
        torch: Any,
        device: Any,
        *,
        sleeps: bool,
    ) -> None:
        self._cuda = torch.cuda
        self._device = device
        self._sleeps = sleeps
        self._peak = self._outside = 0

    def read(self) -> GaugeReading:
        free, total = self._cuda.mem_get_info(self._device)
        used = int(total) - int(free)
        reserved = int(self._cuda.memory_reserved(self._device))
        peak = used
        outside = None
        if not self._sleeps:
            outside = self._outside = max(0, used - reserved)
            peak = int(self._cuda.max_memory_reserved(self._device)) + outside
        self._peak = max(self._peak, peak)
        return GaugeReading(
            peak_bytes=self._peak,
            limit_bytes=int(total),
            by=f"GPU {self._device}",
            outside_bytes=outside,
        )

    def moment(self) -> MemoryMoment:
        """Return peak and present memory, with what was outside torch at the last reading."""
        if self._sleeps:
            free, total = self._cuda.mem_get_info(self._device)
            used = int(total) - int(free)
            self._peak = max(self._peak, used)
            return MemoryMoment(mark_bytes=self._peak, held_bytes=used)
        reserved = self._cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]
        return MemoryMoment(
            mark_bytes=int(reserved["peak"]) + self._outside,
            held_bytes=int(reserved["current"]) + self._outside,
        )


class CpuGauge:
    """Host memory of this process and its children.

    Limits: the memory of the machine or container, and RLIMIT_DATA of this process.
    """

    def __init__(self) -> None:
        self._self = psutil.Process()
        self._peaks: dict[str, int] = {}

    def read(self) -> GaugeReading:
        sizes = status()
        peak = _peak_resident(sizes)
        children = self._self.children(recursive=True)  # data loader workers, engine processes
        peak += sum(_resident(sizes_of_process(child.pid)) for child in children)
        readings = [self._peak_of(peak, machine_memory_bytes(), "the machine's memory")]
        data_limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if data_limit != resource.RLIM_INFINITY and "VmData" in sizes:
            readings.append(
                self._peak_of(
                    sizes["VmData"], data_limit, "this process's limit on data (ulimit -d)"
                )
            )
        return min(readings, key=lambda reading: reading.margin_bytes)

    def moment(self) -> MemoryMoment:
        """Return peak and present memory of this process."""
        sizes = status()
        return MemoryMoment(mark_bytes=_peak_resident(sizes), held_bytes=_resident(sizes))

    def _peak_of(
        self,
        used: int,
        limit: int,
        by: str,
    ) -> GaugeReading:
        self._peaks[by] = max(self._peaks.get(by, 0), used)
        return GaugeReading(
            peak_bytes=self._peaks[by],
            limit_bytes=limit,
            by=by,
        )


def _resident(sizes: dict[str, int]) -> int:
    return sizes.get("RssAnon", 0) + sizes.get("RssShmem", 0)


def _peak_resident(sizes: dict[str, int]) -> int:
    # VmHWM includes file pages; the currently mapped ones were mapped at the peak, too.
    return max(_resident(sizes), sizes.get("VmHWM", 0) - sizes.get("RssFile", 0))


# Margins relative to the limit; each is reported once when the margin falls below it
WARNING_SHARES = (
    0.1,
    0.05,
    0.02,
)
# Above this, half of the points are dropped: the trend covers the whole run in bounded time
MAX_POINTS = 64


@dataclass
class Margin:
    """Margin of one rank over a run. `look` returns new warnings, each kind once."""

    last_step: int | None  # length of the run; None: unknown
    longest: int | None  # longest allowed completion; None: unknown
    by_step: list[CycleMemory] = field(default_factory=list)
    by_length: list[CycleMemory] = field(default_factory=list)
    _reported: set[str] = field(default_factory=set)
    _every: int = 1

    def look(
        self,
        step: int,
        reading: GaugeReading,
        length: int | None = None,
    ) -> list[str]:
        """Return new warnings after a step; `length`: longest completion, if known."""
        if step > SOAK_WARMUP_CYCLES and step % self._every == 0:
            self.by_step.append(_point(step, reading))
            if len(self.by_step) > MAX_POINTS:
                self.by_step, self._every = self.by_step[::2], self._every * 2
            longest = 0
            if self.by_length:
                longest = self.by_length[-1].steps
            if length is not None and length > longest:
                self.by_length = [*self.by_length, _point(length, reading)][-MAX_POINTS:]
        warnings = [self._narrow(reading), self._by_steps(step, reading), self._by_length(reading)]
        new = []
        for kind, warning in filter(None, warnings):
            if kind not in self._reported:
                self._reported.add(kind)
                new.append(warning)
        return new

    def _narrow(self, reading: GaugeReading) -> tuple[str, str] | None:
        below = []
        for share in WARNING_SHARES:
            if reading.margin_bytes < share * reading.limit_bytes:
                below.append(share)
        if not below:
            return None
        margin = format_bytes(max(0, reading.margin_bytes))
        limit = format_bytes(reading.limit_bytes)
        return f"below {min(below)}", f"{margin} left of {limit}, {reading.by}"

    def _by_steps(self, step: int, reading: GaugeReading) -> tuple[str, str] | None:
        growth = growth_of(self.by_step)
        until = step_of_limit(self.by_step, step, reading.margin_bytes)
        if growth is None or until is None or self.last_step is None or until >= self.last_step:
            return None
        return (
            "steps",
            (
                f"the peak grows by {_grows(growth)} a step and reaches the limit of"
                f" {format_bytes(reading.limit_bytes)} after step {until} at the latest; the run"
                f" takes {self.last_step}"
            ),
        )

    def _by_length(self, reading: GaugeReading) -> tuple[str, str] | None:
        growth = growth_of(self.by_length)
        if growth is None or not growth.is_certain or self.longest is None:
            return None
        longest_so_far = self.by_length[-1].steps
        needed = reading.peak_bytes + round(growth.low * max(0, self.longest - longest_so_far))
        if needed <= reading.limit_bytes:
            return None
        return (
            "length",
            (
                f"the peak grows by {_grows(growth)} for each token that the longest completion"
                f" gets longer: with the allowed {self.longest} ({longest_so_far} so far) it is at"
                f" least {format_bytes(needed)} of {format_bytes(reading.limit_bytes)}"
            ),
        )


def _point(at: int, reading: GaugeReading) -> CycleMemory:
    return CycleMemory(
        steps=at,
        seconds=0.0,
        peak_bytes=reading.peak_bytes,
        held_bytes=reading.peak_bytes,
    )


def _grows(growth: MemoryGrowth) -> str:
    return (
        f"{format_bytes(round(growth.bytes_per_step))} (at least {format_bytes(round(growth.low))})"
    )
