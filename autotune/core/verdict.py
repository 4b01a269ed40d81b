"""Verdict: a Measurement compared with the limit."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.measurement import Measurement, Outcome
from autotune.core.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of the comparison with its reason."""

    fits: bool
    why: str
    margin_bytes: int | None  # limit minus peak; negative when over; None: peak unknown


def judge(measurement: Measurement) -> Verdict:
    """Return the verdict: fits means a good end and a peak within the limit."""
    memory = measurement.memory
    margin = None if memory.peak_bytes is None else memory.limit_bytes - memory.peak_bytes
    if measurement.outcome is not Outcome.OK:
        evidence = measurement.failure.evidence if measurement.failure else "no reason was given"
        return Verdict(fits=False, why=f"{measurement.outcome}: {evidence}", margin_bytes=margin)
    if margin is None:
        return Verdict(fits=False, why="it ended well, but its peak memory could not be measured", margin_bytes=None)
    peak = f"peak {format_bytes(memory.peak_bytes or 0)} against the limit of {format_bytes(memory.limit_bytes)}"
    return Verdict(fits=margin >= 0, why=peak, margin_bytes=margin)
