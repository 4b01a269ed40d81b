"""Growth of memory in a long run, and its verdict.

The trend is the median of the slopes between all pairs of cycles (Theil 1950, Sen 1968) with Sen's
distribution-free interval. Single peaks move it little, and no noise distribution is assumed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from autotune.core.measurement import CycleMemory, LoopActivity, Measurement, Outcome
from autotune.core.units import MIB, format_bytes, format_seconds

CONFIDENCE = 0.99  # confidence of the interval; high because a false alarm rejects a good candidate

ALLOCATION_BYTES = 2 * MIB
"""Smallest growth that counts: allocators take memory in pieces of this size."""

MIN_CYCLES = 6  # minimum for a trend: with fewer cycles Sen's interval would span all slopes

SOAK_WARMUP_CYCLES = 2
"""Cycles left out: buffers, caches and the optimizer's state appear in the first ones."""

SoakVerdict = Literal["held", "crossed", "would cross", "too short"]
"""Result of a long run; `would cross`: its trend reaches the limit within the projected steps."""


@dataclass(frozen=True, kw_only=True)
class MemoryGrowth:
    """Growth of the peak per optimizer step, with its 99 % interval."""

    bytes_per_step: float
    low: float
    high: float
    steps: int  # optimizer steps of the fit

    @property
    def is_certain(self) -> bool:
        """True if the interval excludes zero and the growth exceeds one allocation."""
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
    activity = measurement.exercised or LoopActivity()
    cycles = activity.cycles
    growth = growth_of(cycles[SOAK_WARMUP_CYCLES:])
    verdict, why = _verdict(measurement, cycles, growth, projected_steps)
    return Soak(
        seconds=activity.seconds,
        cycles=cycles,
        optimizer_steps=measurement.optimizer_steps,
        growth=growth,
        projected_steps=projected_steps,
        limit_bytes=measurement.memory.limit_bytes,
        peak_bytes=measurement.memory.peak_bytes,
        verdict=verdict,
        why=why,
    )


def _verdict(
    measurement: Measurement,
    cycles: Sequence[CycleMemory],
    growth: MemoryGrowth | None,
    projected: int | None,
) -> tuple[SoakVerdict, str]:
    # 1. A run that did not hold.
    peak = measurement.memory.peak_bytes
    limit = measurement.memory.limit_bytes
    if measurement.outcome is not Outcome.OK or peak is None or peak > limit:
        evidence = "its peak went over the limit"
        if measurement.failure is not None:
            evidence = measurement.failure.evidence
        return "crossed", f"it did not hold ({measurement.outcome}: {evidence})"
    # 2. A trend in doubt.
    if growth is None:
        return "too short", f"{len(cycles)} cycles are too few to tell a trend; soak for longer"
    interval = (
        f"{_signed(growth.bytes_per_step)} a step ({_signed(growth.low)} to {_signed(growth.high)})"
    )
    if not growth.is_certain:
        return "held", f"no growth beyond doubt: {interval}"
    # 3. The steps until it reaches the limit.
    last_step = cycles[-1].steps + math.floor((limit - peak) / growth.low)
    trend = f"it grows by {interval}, which reaches the limit after {last_step} steps at the latest"
    if projected is None:
        return "held", f"{trend}; how many steps the run takes is not known"
    reason = f"{trend}; the run takes {projected}"
    if last_step < projected:
        return "would cross", reason
    return "held", reason


def _signed(count: float) -> str:
    size = format_bytes(round(abs(count)))
    if count < 0:
        return f"-{size}"
    return size


def growth_of(cycles: Sequence[CycleMemory]) -> MemoryGrowth | None:
    """Fit the trend of the cycles' peaks over optimizer steps; None for too few cycles.

    n cycles give N = n (n - 1) / 2 slopes. Kendall's S has the variance n (n - 1) (2n + 5) / 18,
    and the interval excludes (N - z * sd(S)) / 2 slopes on each side (Sen 1968, no ties).
    """
    if len(cycles) < MIN_CYCLES:
        return None
    slopes = []
    for earlier, later in itertools.combinations(cycles, 2):
        steps = later.steps - earlier.steps
        if steps > 0:
            slopes.append((later.peak_bytes - earlier.peak_bytes) / steps)
    slopes.sort()
    n = len(cycles)
    pairs = len(slopes)
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    deviation = z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    outside = max(0, math.floor((pairs - deviation) / 2))
    return MemoryGrowth(
        bytes_per_step=(slopes[(pairs - 1) // 2] + slopes[pairs // 2]) / 2,
        low=slopes[outside],
        high=slopes[pairs - 1 - outside],
        steps=cycles[-1].steps - cycles[0].steps,
    )


def step_of_limit(
    cycles: Sequence[CycleMemory],
    step: int,
    margin_bytes: int,
) -> int | None:
    """Return the step after which a peak that certainly grows reaches the limit at the latest;
    None if it does not grow.
    """
    growth = growth_of(cycles)
    if growth is None or not growth.is_certain:
        return None
    return step + math.floor(margin_bytes / growth.low)


def describe_soak(soak: Soak) -> str:
    """Return one sentence for the report."""
    duration = f"{len(soak.cycles)} cycles in {format_seconds(soak.seconds)}"
    return f"Soaked for {duration}, {soak.optimizer_steps} optimizer steps: {soak.why}."
