"""Soak: memory over a long run of one candidate, extrapolated to the end of the real run.

Trend: median of the slopes between all pairs of cycles (Theil 1950, Sen 1968) with Sen's
distribution-free interval. Single peaks move it little, and no noise distribution is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from autotune.core.measurement import CycleMemory, Measurement, Outcome
from autotune.core.units import MIB, format_bytes, format_seconds

CONFIDENCE = 0.99  # confidence of the interval; high because a false alarm rejects a good candidate
ALLOCATION_BYTES = 2 * MIB  # smallest growth that counts: allocators take memory in pieces of this size
MIN_CYCLES = 6  # minimum for a trend: with fewer cycles Sen's interval would span all slopes
WARMUP_CYCLES = 2  # cycles left out: buffers, caches and the optimizer's state appear in the first ones
SoakVerdict = Literal["held", "crossed", "would cross", "too short"]


@dataclass(frozen=True, kw_only=True)
class MemoryGrowth:
    """Growth of the peak per optimizer step, with its 99 % interval."""

    bytes_per_step: float
    low: float
    high: float
    steps: int  # optimizer steps of the fit

    @property
    def is_certain(self) -> bool:
        """Return True if the interval excludes zero and the growth exceeds one allocation."""
        return self.low > 0 and self.bytes_per_step * self.steps >= ALLOCATION_BYTES


@dataclass(frozen=True, kw_only=True)
class Soak:
    """Long run with its verdict."""

    seconds: float  # training at the longest lengths
    cycles: tuple[CycleMemory, ...]
    optimizer_steps: int
    growth: MemoryGrowth | None  # None: too few cycles
    projected_steps: int | None  # length of the real run, where configured
    limit_bytes: int
    peak_bytes: int | None
    verdict: SoakVerdict
    why: str

    @property
    def holds(self) -> bool:
        return self.verdict in ("held", "too short")


def assess_soak(measurement: Measurement, projected_steps: int | None) -> Soak:
    """Compare a long run with the limit, and its trend with the projected steps."""
    ran = measurement.exercised
    cycles = () if ran is None else ran.cycles
    growth = growth_of(cycles[WARMUP_CYCLES:])
    verdict, why = _verdict(measurement, cycles, growth, projected_steps)
    return Soak(
        seconds=0.0 if ran is None else ran.seconds, cycles=cycles, optimizer_steps=measurement.optimizer_steps, growth=growth,
        projected_steps=projected_steps, limit_bytes=measurement.memory.limit_bytes, peak_bytes=measurement.memory.peak_bytes,
        verdict=verdict, why=why,
    )  # fmt: skip


def _verdict(
    measurement: Measurement, cycles: Sequence[CycleMemory], growth: MemoryGrowth | None, projected: int | None
) -> tuple[SoakVerdict, str]:
    memory = measurement.memory
    if measurement.outcome is not Outcome.OK or memory.peak_bytes is None or memory.peak_bytes > memory.limit_bytes:
        evidence = measurement.failure.evidence if measurement.failure else "its peak went over the limit"
        return "crossed", f"it did not hold ({measurement.outcome}: {evidence})"
    if growth is None:
        return "too short", f"{len(cycles)} cycles are too few to tell a trend; soak for longer"
    interval = f"{_signed(growth.bytes_per_step)} a step ({_signed(growth.low)} to {_signed(growth.high)})"
    if not growth.is_certain:
        return "held", f"no growth beyond doubt: {interval}"
    until = cycles[-1].steps + math.floor((memory.limit_bytes - memory.peak_bytes) / growth.low)
    trend = f"it grows by {interval}, which reaches the limit after {until} steps at the latest"
    if projected is None:
        return "held", f"{trend}; how many steps the run takes is not known"
    return ("would cross" if until < projected else "held"), f"{trend}; the run takes {projected}"


def _signed(count: float) -> str:
    return ("-" if count < 0 else "") + format_bytes(round(abs(count)))


def growth_of(cycles: Sequence[CycleMemory]) -> MemoryGrowth | None:
    """Fit the trend of the cycles' peaks over optimizer steps; None for too few cycles.

    n cycles give N = n (n - 1) / 2 slopes. Kendall's S has the variance n (n - 1) (2n + 5) / 18,
    and the interval excludes (N - z * sd(S)) / 2 slopes on each side (Sen 1968, no ties).
    """
    if len(cycles) < MIN_CYCLES:
        return None
    slopes = sorted(
        (later.peak_bytes - earlier.peak_bytes) / (later.steps - earlier.steps)
        for at, earlier in enumerate(cycles)
        for later in cycles[at + 1 :]
        if later.steps > earlier.steps
    )
    count, pairs = len(cycles), len(slopes)
    deviation = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    outside = max(0, math.floor((pairs - deviation) / 2))
    median = (slopes[(pairs - 1) // 2] + slopes[pairs // 2]) / 2
    steps = cycles[-1].steps - cycles[0].steps
    return MemoryGrowth(bytes_per_step=median, low=slopes[outside], high=slopes[pairs - 1 - outside], steps=steps)


def describe_soak(soak: Soak) -> str:
    """Return one sentence for the report."""
    ran = f"{len(soak.cycles)} cycles in {format_seconds(soak.seconds)}, {soak.optimizer_steps} optimizer steps"
    return f"Soaked for {ran}: {soak.why}."
