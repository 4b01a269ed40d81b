"""One measured candidate as a row of the document. Figures are as measured; what was not measured is null."""

from __future__ import annotations

from typing import Any

from autotune.measurement import Measurement, Speed
from autotune.prediction import Estimate
from autotune.recommendation import Expected, Trial


def trial_row(trial: Trial) -> dict[str, Any]:
    """Everything that a table or a figure may want to know of it."""
    return {
        "trial": trial.number,
        **_outcome(trial),
        "fits": trial.verdict.fits,
        "tokens_per_second": speeds(trial.measurement),
        **_evidence(trial),
        "prediction": _expected(trial.expected),
    }


def baseline_row(trial: Trial) -> dict[str, Any]:
    """The same, with the one figure for speed that the contract has there."""
    return {**trial_row(trial), "tokens_per_second": rate(trial.measurement.ranking_speed)}


def _outcome(trial: Trial) -> dict[str, Any]:
    return {
        "knobs": dict(trial.candidate.knobs),
        "outcome": str(trial.measurement.outcome),
        "why": trial.verdict.why,
        "peak_memory_bytes": trial.measurement.memory.peak_bytes,
    }


def _evidence(trial: Trial) -> dict[str, Any]:
    measured, failure = trial.measurement, trial.measurement.failure
    return {
        "phase": failure.phase if failure else None,
        "cause": failure.cause if failure else None,
        "evidence": failure.evidence if failure else "",
        "excerpt": failure.excerpt if failure else "",
        "seconds": _spent(measured),
        "phase_peak_bytes": dict(measured.memory.phase_peak_bytes),
        "phase_seconds": dict(measured.worst.phase_seconds) if measured.worst else {},
        "timed_cycles": len(measured.worst.cycle_seconds) if measured.worst else 0,
    }


def _spent(measurement: Measurement) -> dict[str, float]:
    """What the measuring took: in all, its steps, times devices; and what was taken over instead of run again."""
    cost, worst = measurement.cost, measurement.worst
    spent: dict[str, float | None] = {"total": cost.total_seconds, "load": cost.load_seconds, "setup": cost.setup_seconds}
    spent |= {"loop": cost.loop_seconds, "device": cost.device_seconds}
    spent["borrowed"] = worst.borrowed_seconds if worst else None
    return {name: round(seconds, 3) for name, seconds in spent.items() if seconds is not None}


def _expected(foreseen: Expected | None) -> dict[str, Any] | None:
    """What was predicted of it, under a name of its own: never among the measured figures."""
    if foreseen is None:
        return None
    return {
        "peak_memory_bytes": _interval(foreseen.peak_memory_bytes),
        "tokens_per_second": None if foreseen.tokens_per_second is None else _interval(foreseen.tokens_per_second),
    }


def _interval(estimate: Estimate) -> dict[str, float]:
    return {"value": round(estimate.value, 2), "low": round(estimate.low, 2), "high": round(estimate.high, 2)}


def speeds(measurement: Measurement) -> dict[str, float | None]:
    return {"worst": rate(measurement.worst), "typical": rate(measurement.typical)}


def rate(speed: Speed | None) -> float | None:
    return round(speed.tokens_per_second, 2) if speed else None
