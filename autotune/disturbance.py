"""How much probes that run beside each other on one machine disturb each other: one of them, measured again alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.measurement import Measurement, Speed

FEWEST_CYCLES = 2
"""Of fewer, nobody can say how much they scatter."""


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """One candidate's speed beside other probes, against its speed alone."""

    candidate_id: str
    beside: int
    """How many other probes ran beside it on the machine."""

    tokens_per_second_beside: float
    tokens_per_second_alone: float
    slower_share: float
    """By how much of its speed alone it was slower beside others; below 0 where it was faster."""

    uncertainty: float | None
    """Two standard errors of that share, from how much single cycles scatter; None where there were too few."""

    by_phase: Mapping[str, float] = field(default_factory=dict)
    """By how much of its seconds alone each phase of a cycle took longer beside others."""

    @property
    def shows(self) -> bool:
        """Whether it is more than the scatter of single cycles."""
        return self.uncertainty is None or abs(self.slower_share) > self.uncertainty


def disturbance_of(alone: Measurement, beside: Measurement) -> Disturbance | None:
    """None where one of the two has no speed, or nothing ran beside the second."""
    lonely, crowded = alone.worst, beside.worst
    if lonely is None or crowded is None or not beside.beside:
        return None
    return Disturbance(
        candidate_id=beside.candidate_id,
        beside=beside.beside,
        tokens_per_second_beside=crowded.tokens_per_second,
        tokens_per_second_alone=lonely.tokens_per_second,
        slower_share=1 - crowded.tokens_per_second / lonely.tokens_per_second,
        uncertainty=_uncertainty(lonely, crowded),
        by_phase=_by_phase(lonely, crowded),
    )


def _uncertainty(lonely: Speed, crowded: Speed) -> float | None:
    errors = [_error(speed.rates) for speed in (lonely, crowded)]
    known = [error for error in errors if error is not None]
    if len(known) < len(errors):
        return None
    return 2 * math.sqrt(sum(error**2 for error in known)) * crowded.tokens_per_second / lonely.tokens_per_second


def _error(rates: Sequence[float]) -> float | None:
    """Standard error of the mean of the logarithms."""
    if len(rates) < FEWEST_CYCLES:
        return None
    logarithms = [math.log(rate) for rate in rates]
    mean = sum(logarithms) / len(logarithms)
    variance = sum((one - mean) ** 2 for one in logarithms) / (len(logarithms) - 1)
    return math.sqrt(variance / len(logarithms))


def _by_phase(lonely: Speed, crowded: Speed) -> dict[str, float]:
    """Seconds of one cycle, phase by phase; phases that took next to nothing alone are left out."""
    whole = sum(lonely.phase_seconds.values())
    shares = {}
    for phase, seconds in lonely.phase_seconds.items():
        if phase in crowded.phase_seconds and seconds > 0.01 * whole:
            one, other = seconds / len(lonely.cycle_seconds), crowded.phase_seconds[phase] / len(crowded.cycle_seconds)
            shares[phase] = other / one - 1
    return shares


def in_words(found: Disturbance) -> str:
    """One sentence; the finalists' own figures are not touched by it, as they are measured alone."""
    others = f"{found.beside} other{'s' if found.beside > 1 else ''}"
    way = "slower" if found.slower_share >= 0 else "faster"
    surely = "" if found.uncertainty is None else f" ± {found.uncertainty:.1%}"
    size = f"{abs(found.slower_share):.1%}{surely} {way} beside {others} on its machine than alone"
    doubt = "" if found.shows else ", which is within the scatter of its cycles"
    return f"Probes ran at the same time: one was {size}{doubt}. The finalists were measured alone."
