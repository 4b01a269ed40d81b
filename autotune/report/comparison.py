"""Comparison of the recommendation with the baseline, and the interval of a measured speed."""

from __future__ import annotations

from typing import Any

from autotune.core.answer import Recommendation, plain
from autotune.core.measurement import Speed


def relative_spread(speed: Speed | None, answer: Recommendation) -> float | None:
    """Return the relative half width of a speed's 95 % interval, the spread between runs included;
    without it (answers of earlier versions) that of the cycles."""
    if _is_predicted(answer):
        return None
    if speed is None or answer.run_spread is None:
        return speed.spread if speed else None
    return answer.run_spread.half_width(speed)


def describe_advantage(answer: Recommendation) -> str | None:
    """Return one sentence about the recommendation's speed and the baseline's; None without a
    comparison."""
    found = answer.advantage
    if found is None or _is_predicted(answer):
        return None
    size = f"{found.ratio:.2f} times the baseline's speed (95 % confidence: at least {found.low:.2f} times)"
    if found.why == "measurably faster":
        return f"Measurably faster: {size}."
    if found.why == "within the noise":
        return f"No measurable difference: the fastest other candidate had {size}. The baseline is kept."
    return f"The baseline is kept: the fastest other candidate had {size}, but was not confirmed. Go on with --resume."


def advantage_row(answer: Recommendation) -> dict[str, Any] | None:
    """Return the comparison for recommendation.json."""
    found = answer.advantage
    return None if found is None or _is_predicted(answer) else {**plain(found), "says": describe_advantage(answer)}


def _is_predicted(answer: Recommendation) -> bool:
    """Return True if the speeds are predictions: on emulated GPUs there is no spread between runs."""
    return any(trial.measurement.emulated for trial in answer.trials)
