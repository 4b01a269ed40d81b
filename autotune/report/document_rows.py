"""Rows of the document: a candidate, measured or predicted, a change, a long run, the job. An
unknown figure is null.

These keys are a contract with readers of recommendation.json, apart from the serialised form of a
trial in studies and in the store (`core.plain_data.plain`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.core.answer import Expected, PredictedCandidate, Trial, WayToFit
from autotune.core.dataset import RowLengths, TokenLengths
from autotune.core.job import Job
from autotune.core.measurement import Failure, Measurement, Speed
from autotune.core.memory_growth import Soak
from autotune.core.prediction import EngineFit, Estimate, PhasePrediction, Prediction
from autotune.core.run_statistics import Disturbance, describe_interference

Row = dict[str, Any]
"""Part of recommendation.json, by key."""

LISTED = (
    "peak_memory_bytes",
    "tokens_per_second",
    "tokens_per_second_at_lengths",
    "fits",
    "peak_memory_bytes_at_lengths",
    "fits_at_lengths",
    "failure",
    "depends_on",
)
"""Fields of a prediction in lists of candidates."""

NO_FAILURE = Failure(evidence="")


def trial_row(trial: Trial) -> Row:
    """Return a measured or emulated candidate."""
    measured = trial.measurement
    failure = measured.failure or NO_FAILURE
    phase_seconds: dict[str, float] = {}
    timed_cycles = 0
    if measured.worst is not None:
        phase_seconds.update(measured.worst.phase_seconds)
        timed_cycles = len(measured.worst.cycle_seconds)
    return {
        "trial": trial.number,
        "knobs": dict(trial.candidate.knobs),
        "basis": measured.basis,
        "outcome": str(measured.outcome),
        "why": trial.verdict.why,
        "peak_memory_bytes": measured.memory.peak_bytes,
        "fits": trial.verdict.fits,
        "tokens_per_second": speeds(measured),
        "phase": failure.phase,
        "cause": failure.cause,
        "evidence": failure.evidence,
        "excerpt": failure.excerpt,
        "seconds": _cost_row(measured),
        "phase_peak_bytes": dict(measured.memory.phase_peak_bytes),
        "phase_seconds": phase_seconds,
        "timed_cycles": timed_cycles,
        "prediction": _expected_row(trial.expected),
    }


def _cost_row(measured: Measurement) -> dict[str, float]:
    """Return the seconds that a probe took, by what took them."""
    cost = measured.cost
    seconds = {
        "total": cost.total_seconds,
        "load": cost.load_seconds,
        "setup": cost.setup_seconds,
        "loop": cost.loop_seconds,
        "device": cost.device_seconds,
    }
    if measured.worst is not None:
        seconds["borrowed"] = measured.worst.borrowed_seconds
    return {name: round(value, 3) for name, value in seconds.items() if value is not None}


def _expected_row(expected: Expected | None) -> Row | None:
    """Return the figures that a measured candidate was predicted to have."""
    if expected is None:
        return None
    return {
        "peak_memory_bytes": interval(expected.peak_memory_bytes, 2),
        "tokens_per_second": interval(expected.tokens_per_second, 2),
    }


def predicted_row(predicted: PredictedCandidate) -> Row:
    """Return a predicted candidate."""
    prediction = predicted.prediction
    row = prediction_row(prediction)
    return {
        "knobs": dict(predicted.candidate.knobs),
        "basis": "predicted",
        "outcome": None,
        "fits": prediction.fits,
        "tokens_per_second": middle(prediction.tokens_per_second),
        "peak_memory_bytes": middle(prediction.peak_memory_bytes),
        "prediction": {name: row[name] for name in LISTED},
    }


def prediction_row(prediction: Prediction) -> Row:
    """Return a whole prediction."""
    return {
        "basis": prediction.basis,
        "fits": prediction.fits,
        "depends_on": list(prediction.depends_on),
        "failure": prediction.failure,
        "peak_memory_bytes": interval(prediction.peak_memory_bytes),
        "peak_memory_bytes_at_lengths": interval(prediction.peak_memory_bytes_at_lengths),
        "fits_at_lengths": prediction.fits_at_lengths,
        "limit_bytes": prediction.limit_bytes,
        "usable_bytes": interval(prediction.deciding_limit),
        "margin_bytes": interval(prediction.margin_bytes),
        "torch_peak_allocated_bytes": interval(prediction.torch_peak_allocated_bytes),
        "torch_peak_reserved_bytes": interval(prediction.torch_peak_reserved_bytes),
        "host_memory_bytes": interval(prediction.host_memory_bytes),
        "phases": list(map(_phase_row, prediction.phases)),
        "breakdown": _part_rows(prediction.breakdown),
        "engine": _engine_row(prediction.engine),
        "tokens_per_second": interval(prediction.tokens_per_second, 3),
        "tokens_per_second_at_lengths": interval(prediction.tokens_per_second_at_lengths, 3),
        "effective": dict(prediction.effective),
        "assumptions": list(prediction.assumptions),
        "versions": dict(prediction.versions),
    }


def _engine_row(engine: EngineFit | None) -> Row | None:
    if engine is None:
        return None
    return {
        "kv_cache_bytes": interval(engine.kv_cache_bytes),
        "kv_cache_tokens": engine.kv_cache_tokens,
        "concurrency": round(engine.concurrency, 2),
        "longest_length": engine.longest_length,
    }


def _phase_row(phase: PhasePrediction) -> Row:
    return {
        "name": phase.name,
        "peak_bytes": interval(phase.peak_bytes),
        "live_bytes": phase.live_bytes,
        "seconds": interval(phase.seconds, 3),
        "breakdown": _part_rows(phase.parts),
    }


def _part_rows(parts: Mapping[str, int]) -> list[Row]:
    return [{"name": name, "bytes": size} for name, size in parts.items()]


def speeds(measurement: Measurement) -> dict[str, float | None]:
    return {"worst": rate(measurement.worst), "typical": rate(measurement.typical)}


def rate(speed: Speed | None) -> float | None:
    return None if speed is None else round(speed.tokens_per_second, 2)


def rounded(figure: float | None, digits: int) -> float | None:
    return None if figure is None else round(figure, digits)


def middle(estimate: Estimate | None) -> float | int | None:
    """Return the single figure of an estimate, in a row whose `basis` is "predicted"."""
    if estimate is None:
        return None
    return round(estimate.value) if estimate.value >= 1e6 else round(estimate.value, 2)


def interval(estimate: Estimate | None, digits: int | None = None) -> dict[str, float] | None:
    if estimate is None:
        return None
    return {
        "value": round(estimate.value, digits),
        "low": round(estimate.low, digits),
        "high": round(estimate.high, digits),
    }


def way_row(way: WayToFit) -> Row:
    return {
        "change": dict(way.change),
        "learning": way.learning,
        "margin_bytes": interval(way.prediction.margin_bytes),
        "peak_memory_bytes": interval(way.prediction.peak_memory_bytes),
        "speed_ratio": rounded(way.speed_ratio, 3),
    }


def soak_row(soak: Soak) -> Row:
    """Return a long run with the trend of its memory."""
    growth = soak.growth
    cycles = []
    for cycle in soak.cycles:
        cycles.append([cycle.steps, cycle.seconds, cycle.peak_bytes, cycle.held_bytes])
    return {
        "verdict": soak.verdict,
        "why": soak.why,
        "seconds": round(soak.seconds, 2),
        "cycles": cycles,
        "cycle_columns": ["optimizer_steps", "seconds", "peak_bytes", "held_bytes"],
        "optimizer_steps": soak.optimizer_steps,
        "growth_bytes_per_step": (
            growth and {"value": growth.bytes_per_step, "low": growth.low, "high": growth.high}
        ),
        "projected_steps": soak.projected_steps,
        "peak_bytes": soak.peak_bytes,
        "limit_bytes": soak.limit_bytes,
    }


def disturbance_row(disturbance: Disturbance) -> Row:
    by_phase = {}
    for phase, share in disturbance.by_phase.items():
        by_phase[phase] = round(share, 4)
    return {
        "beside": disturbance.beside,
        "tokens_per_second_beside": round(disturbance.tokens_per_second_beside, 2),
        "tokens_per_second_alone": round(disturbance.tokens_per_second_alone, 2),
        "slower_share": round(disturbance.slower_share, 4),
        "uncertainty": rounded(disturbance.uncertainty, 4),
        "by_phase": by_phase,
        "candidate_id": disturbance.candidate_id,
        "says": describe_interference(disturbance),
    }


def job_row(job: Job) -> Mapping[str, Any]:
    """Return the job, under the document's key `question`."""
    workload = job.task.workload
    hardware = job.task.hardware
    return {
        "model": workload.model.name,
        "model_from": workload.model.origin,
        "method": workload.method,
        "framework": workload.framework,
        "tuning": workload.tuning,
        "weights": workload.weights,
        "hardware": str(hardware),
        "memory_limit_bytes": job.memory_limit_bytes,
        "space": job.space.name,
        "budget_seconds": job.budget_seconds,
        "typical_completion_length": workload.typical_completion_length,
        "completion_lengths": _lengths_row(workload.completion_lengths),
        "prompt_lengths": _lengths_row(workload.prompt_lengths),
        "dataset": data_row(job.data),
    }


def _lengths_row(lengths: TokenLengths | None) -> Row | None:
    if lengths is None:
        return None
    return {"source": lengths.source, "mean": round(lengths.mean, 1), "p95": lengths.quantile(0.95)}


def data_row(lengths: RowLengths | None) -> Row | None:
    """Return the lengths for a document; shares refer to the rows that were read."""
    if lengths is None:
        return None
    percentiles = []
    for at in lengths.percentiles:
        percentiles.append(
            {
                "share": at.share,
                "length": at.length,
                "rows_longer": at.longer,
                "truncating_drops_tokens": at.cut,
                "filtering_drops_tokens": at.left_out,
            }
        )
    return {
        "rows": lengths.rows,
        "looked_at": lengths.looked_at,
        "tokens": lengths.tokens,
        "percentiles": percentiles,
    }
