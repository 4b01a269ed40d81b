"""Soak: what memory did over a long run of one candidate, and whether it would still fit at the end of a real one.

The trend is the median of all slopes between two cycles (Theil 1950, Sen 1968), with Sen's distribution-free interval: a peak
that jumps once moves it little, and nothing is assumed about how peaks scatter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from autotune.measurement import Cycle, Measurement, Outcome
from autotune.units import MIB, format_bytes, format_seconds

CONFIDENCE = 0.99
"""Of the trend's interval: a false alarm costs a good candidate, and is carried on over all the steps that are to come."""

GRAIN_BYTES = 2 * MIB
"""Less growth than this over the whole soak is none: allocators take memory in pieces of this size."""

FEWEST_CYCLES = 6
"""With fewer cycles nothing is said about a trend: Sen's interval would span all slopes there are."""

SETTLING = 2
"""Cycles left out: buffers, caches and the optimizer's state appear in the first ones."""

Holds = Literal["held", "crossed", "would cross", "too short"]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How fast the peak of a cycle grows with optimizer steps, and between which bounds."""

    bytes_per_step: float
    low: float
    high: float
    """With a confidence of 99 %."""

    steps: int
    """Optimizer steps over which it was seen."""

    @property
    def is_certain(self) -> bool:
        """Whether it grows at all, beyond doubt."""
        return self.low > 0 and self.bytes_per_step * self.steps >= GRAIN_BYTES


@dataclass(frozen=True, kw_only=True)
class Soak:
    """One long run, judged."""

    seconds: float
    """Of training, at the longest lengths."""

    cycles: tuple[Cycle, ...]
    optimizer_steps: int
    growth: Growth | None
    """None where there were too few cycles to tell."""

    projected_steps: int | None
    """How long the real run is, where the user's configuration says so."""

    limit_bytes: int
    peak_bytes: int | None
    verdict: Holds
    why: str

    @property
    def holds(self) -> bool:
        return self.verdict in ("held", "too short")


def judge_soak(measurement: Measurement, projected_steps: int | None) -> Soak:
    """The long run held against the limit, and its trend against the steps that are to come."""
    ran = measurement.exercised
    cycles = () if ran is None else ran.cycles
    memory = measurement.memory
    growth = growth_of(cycles[SETTLING:])
    verdict, why = _verdict(measurement, cycles, growth, projected_steps)
    return Soak(
        seconds=0.0 if ran is None else ran.seconds,
        cycles=cycles,
        optimizer_steps=measurement.optimizer_steps,
        growth=growth,
        projected_steps=projected_steps,
        limit_bytes=memory.limit_bytes,
        peak_bytes=memory.peak_bytes,
        verdict=verdict,
        why=why,
    )


def _verdict(
    measurement: Measurement, cycles: Sequence[Cycle], growth: Growth | None, projected: int | None
) -> tuple[Holds, str]:
    memory = measurement.memory
    if measurement.outcome is not Outcome.OK or memory.peak_bytes is None or memory.peak_bytes > memory.limit_bytes:
        evidence = measurement.failure.evidence if measurement.failure else "its peak went over the limit"
        return "crossed", f"it did not hold ({measurement.outcome}: {evidence})"
    if growth is None:
        return "too short", f"{len(cycles)} cycles are too few to tell a trend; soak for longer"
    if not growth.is_certain:
        return "held", f"no growth beyond doubt: {_per_step(growth)}"
    room = memory.limit_bytes - memory.peak_bytes
    until = cycles[-1].steps + math.floor(room / growth.low)
    said = f"it grows by {_per_step(growth)}, which reaches the limit after {until} steps at the latest"
    if projected is None:
        return "held", f"{said}; how many steps the run takes is not known"
    return ("would cross" if until < projected else "held"), f"{said}; the run takes {projected}"


def _per_step(growth: Growth) -> str:
    return f"{_signed(growth.bytes_per_step)} a step ({_signed(growth.low)} to {_signed(growth.high)})"


def _signed(count: float) -> str:
    return ("-" if count < 0 else "") + format_bytes(round(abs(count)))


def growth_of(cycles: Sequence[Cycle]) -> Growth | None:
    """The trend of the cycles' peaks over optimizer steps; None for too few of them."""
    if len(cycles) < FEWEST_CYCLES:
        return None
    slopes = sorted(
        (later.peak_bytes - earlier.peak_bytes) / (later.steps - earlier.steps)
        for at, earlier in enumerate(cycles)
        for later in cycles[at + 1 :]
        if later.steps > earlier.steps
    )
    count, pairs = len(cycles), len(slopes)
    # Sen (1968): the variance of Kendall's S without ties gives how many slopes lie outside on each side.
    deviation = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    outside = max(0, math.floor((pairs - deviation) / 2))
    middle = (slopes[(pairs - 1) // 2] + slopes[pairs // 2]) / 2
    steps = cycles[-1].steps - cycles[0].steps
    return Growth(bytes_per_step=middle, low=slopes[outside], high=slopes[pairs - 1 - outside], steps=steps)


def words_of(soak: Soak) -> str:
    """One sentence about it."""
    ran = f"{len(soak.cycles)} cycles in {format_seconds(soak.seconds)}, {soak.optimizer_steps} optimizer steps"
    return f"Soaked for {ran}: {soak.why}."
