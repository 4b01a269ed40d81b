"""Verdict: a Measurement held against the limit."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.measurement import Measurement, Outcome
from autotune.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a candidate fits, and why."""

    fits: bool
    why: str
    margin_bytes: int | None
    """Limit minus peak; negative when over; None when the peak is not known."""


def judge(measurement: Measurement) -> Verdict:
    """A candidate fits when it ended well and its peak stayed within the limit."""
    memory = measurement.memory
    margin = None if memory.peak_bytes is None else memory.limit_bytes - memory.peak_bytes
    if measurement.outcome is not Outcome.OK:
        evidence = measurement.failure.evidence if measurement.failure else "no reason was given"
        return Verdict(fits=False, why=f"{measurement.outcome}: {evidence}", margin_bytes=margin)
    if margin is None:
        return Verdict(fits=False, why="it ended well, but its peak memory could not be measured", margin_bytes=None)
    held = f"peak {format_bytes(memory.peak_bytes or 0)} against the limit of {format_bytes(memory.limit_bytes)}"
    return Verdict(fits=margin >= 0, why=held, margin_bytes=margin)
