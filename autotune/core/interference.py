"""Interference between concurrent probes on one machine: one of them is measured again alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.core.measurement import Measurement, Speed


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Speed of one candidate next to other probes, compared with its speed alone."""

    candidate_id: str
    beside: int  # other probes on the machine at the same time
    tokens_per_second_beside: float
    tokens_per_second_alone: float
    slower_share: float  # 1 - beside / alone; negative: faster
    uncertainty: float | None  # two standard errors of `slower_share`; None: too few cycles
    by_phase: Mapping[str, float] = field(default_factory=dict)  # relative increase in seconds per cycle

    @property
    def shows(self) -> bool:
        """Return True if the difference exceeds the scatter of single cycles."""
        return self.uncertainty is None or abs(self.slower_share) > self.uncertainty


def measure_interference(alone: Measurement, beside: Measurement) -> Disturbance | None:
    """Compare two measurements; None if one has no speed or no probe ran next to the second."""
    lonely, crowded = alone.worst, beside.worst
    if lonely is None or crowded is None or not beside.beside:
        return None
    whole, by_phase = sum(lonely.phase_seconds.values()), {}
    for phase, seconds in lonely.phase_seconds.items():  # without phases below 1 % of a cycle
        if phase in crowded.phase_seconds and seconds > 0.01 * whole:
            one, other = seconds / len(lonely.cycle_seconds), crowded.phase_seconds[phase] / len(crowded.cycle_seconds)
            by_phase[phase] = other / one - 1
    return Disturbance(
        candidate_id=beside.candidate_id,
        beside=beside.beside,
        tokens_per_second_beside=crowded.tokens_per_second,
        tokens_per_second_alone=lonely.tokens_per_second,
        slower_share=1 - crowded.tokens_per_second / lonely.tokens_per_second,
        uncertainty=_uncertainty(lonely, crowded),
        by_phase=by_phase,
    )


def _uncertainty(lonely: Speed, crowded: Speed) -> float | None:
    """Return 2 * sqrt(se_alone^2 + se_beside^2) * v_beside / v_alone, se: standard error of the mean log rate."""
    variances = []
    for speed in (lonely, crowded):
        logarithms = [math.log(rate) for rate in speed.rates]
        count = len(logarithms)
        if count < 2:
            return None
        mean = sum(logarithms) / count
        variances.append(sum((one - mean) ** 2 for one in logarithms) / (count - 1) / count)
    return 2 * math.sqrt(sum(variances)) * crowded.tokens_per_second / lonely.tokens_per_second


def describe_interference(found: Disturbance) -> str:
    """Return one sentence for the report; figures of finalists, measured alone, stay valid."""
    others = f"{found.beside} other{'s' if found.beside > 1 else ''}"
    direction = "slower" if found.slower_share >= 0 else "faster"
    error = "" if found.uncertainty is None else f" ± {found.uncertainty:.1%}"
    size = f"{abs(found.slower_share):.1%}{error} {direction} beside {others} on its machine than alone"
    doubt = "" if found.shows else ", which is within the scatter of its cycles"
    return f"Probes ran at the same time: one was {size}{doubt}. The finalists were measured alone."
