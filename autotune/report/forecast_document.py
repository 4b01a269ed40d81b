"""Predictions as JSON: what `predict --json` prints, and `run --json` where nothing could be measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.candidate import Candidate
from autotune.forecast import Forecast, Foreseen, WayToFit
from autotune.predict.unknown import Way
from autotune.prediction import EngineFit, Estimate, PhasePrediction, Prediction
from autotune.question import Question
from autotune.report.document import SCHEMA, change_row, question_row


def prediction_document(
    question: Question,
    candidate: Candidate,
    prediction: Prediction,
    ways: Sequence[WayToFit],
    *,
    unknown: Sequence[Way] = (),
) -> dict[str, Any]:
    """One candidate. Every figure is a prediction."""
    return {
        "schema": SCHEMA,
        **_prediction(prediction),
        "settings": dict(candidate.settings),
        "ways_to_fit": [_way(way) for way in ways],
        "unknown": [_possible(way) for way in unknown],
        "question": question_row(question),
    }


def forecast_document(
    question: Question, answer: Forecast, files: Sequence[str], *, confirm_with: str, warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """The answer of a search on predictions alone. Every part with a figure says `basis: predicted`."""
    return {
        "schema": SCHEMA,
        "status": _status(answer),
        "basis": "predicted",
        "recommendation": _recommended(question, answer, files),
        "baseline": None if answer.baseline is None else _row(answer.baseline),
        "changes": [change_row(change) for change in answer.changes],
        "runner_ups": [_row(one) for one in answer.runner_ups],
        "trade_offs": [_trade_off(answer, one) for one in answer.trade_offs],
        "undecided": None if answer.undecided is None else _row(answer.undecided),
        "nearest_miss": None if answer.nearest_miss is None else _row(answer.nearest_miss),
        "counts": _counts(answer),
        "proven": "not proven infeasible" if answer.winner is None else "budget spent",
        "stopped_by": "budget" if answer.ended_by_budget else None,
        "confirm_with": confirm_with,
        "question": question_row(question),
        "study": None,  # nothing was measured, so there is none
        "out": str(question.out),
        "elapsed_seconds": round(answer.elapsed_seconds, 2),
        "gpu_seconds": None,
        "warnings": list(warnings),
        "versions": dict(answer.winner.prediction.versions) if answer.winner else {},
    }


def _possible(way: Way) -> dict[str, Any]:
    """One way in which what was not given can be."""
    return {"facts": dict(way.facts), **_prediction(way.prediction)}


def _status(answer: Forecast) -> str:
    if answer.winner is not None:
        return "ok"
    return "nothing_fits" if answer.screened == answer.candidates else "undecided"


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "basis": prediction.basis,
        "fits": prediction.fits,
        "depends_on": list(prediction.depends_on),
        "failure": prediction.failure,
        "peak_memory_bytes": _whole(prediction.peak_memory_bytes),
        "limit_bytes": prediction.limit_bytes,
        "margin_bytes": _whole(prediction.margin_bytes),
        "torch_peak_allocated_bytes": _whole(prediction.torch_peak_allocated_bytes),
        "torch_peak_reserved_bytes": _whole(prediction.torch_peak_reserved_bytes),
        "host_memory_bytes": _whole(prediction.host_memory_bytes),
        "phases": [_phase(phase) for phase in prediction.phases],
        "breakdown": [{"name": name, "bytes": size} for name, size in prediction.breakdown.items()],
        "engine": _engine(prediction.engine),
        "tokens_per_second": _rate(prediction.tokens_per_second),
        "effective": dict(prediction.effective),
        "assumptions": list(prediction.assumptions),
        "versions": dict(prediction.versions),
    }


def _phase(phase: PhasePrediction) -> dict[str, Any]:
    return {
        "name": phase.name,
        "peak_bytes": _whole(phase.peak_bytes),
        "seconds": _rate(phase.seconds),
        "breakdown": [{"name": name, "bytes": size} for name, size in phase.parts.items()],
    }


def _engine(engine: EngineFit | None) -> dict[str, Any] | None:
    if engine is None:
        return None
    return {
        "kv_cache_bytes": _whole(engine.kv_cache_bytes),
        "kv_cache_tokens": engine.kv_cache_tokens,
        "concurrency": round(engine.concurrency, 2),
        "longest_length": engine.longest_length,
    }


def _recommended(question: Question, answer: Forecast, files: Sequence[str]) -> dict[str, Any] | None:
    if answer.winner is None:
        return None
    winner, prediction = answer.winner.candidate, answer.winner.prediction
    return {
        "knobs": dict(winner.knobs),
        "settings": dict(winner.settings),
        "changed_learning_knobs": {change.name: change.recommended for change in answer.changes if change.effect == "learning"},
        "relaxed": dict(answer.relaxed),
        "basis": "predicted",
        "tokens_per_second": {"worst": _middle(prediction.tokens_per_second), "typical": None},
        "peak_memory_bytes": _middle(prediction.peak_memory_bytes),
        "prediction": _prediction(prediction),
        "limit_bytes": question.memory_limit_bytes,
        "certificate": None,
        "files": list(files),
    }


def _row(one: Foreseen) -> dict[str, Any]:
    prediction = one.prediction
    return {
        "knobs": dict(one.candidate.knobs),
        "basis": "predicted",
        "outcome": None,
        "fits": prediction.fits,
        "tokens_per_second": _middle(prediction.tokens_per_second),
        "peak_memory_bytes": _middle(prediction.peak_memory_bytes),
        "prediction": {
            "peak_memory_bytes": _whole(prediction.peak_memory_bytes),
            "tokens_per_second": _rate(prediction.tokens_per_second),
            "failure": prediction.failure,
            "depends_on": list(prediction.depends_on),
        },
    }


def _trade_off(answer: Forecast, one: Foreseen) -> dict[str, Any]:
    chosen: Mapping[str, object] = answer.winner.candidate.knobs if answer.winner else {}
    return {"change": {name: value for name, value in one.candidate.knobs.items() if chosen.get(name) != value}, **_row(one)}


def _way(way: WayToFit) -> dict[str, Any]:
    return {
        "change": dict(way.change),
        "learning": way.learning,
        "margin_bytes": _whole(way.prediction.margin_bytes),
        "peak_memory_bytes": _whole(way.prediction.peak_memory_bytes),
        "speed_ratio": None if way.speed_ratio is None else round(way.speed_ratio, 3),
    }


def _counts(answer: Forecast) -> dict[str, int]:
    nothing_ran = dict.fromkeys(("implied", "probed", "out_of_memory", "failed", "loads"), 0)
    return {"candidates": answer.candidates, "predicted": answer.predicted, "screened": answer.screened, **nothing_ran}


def _middle(estimate: Estimate | None) -> float | int | None:
    """Where the contract has one figure; `basis` beside it says that nobody measured it."""
    if estimate is None:
        return None
    return round(estimate.value) if estimate.value >= 1e6 else round(estimate.value, 2)


def _whole(estimate: Estimate | None) -> dict[str, int] | None:
    if estimate is None:
        return None
    return {"value": round(estimate.value), "low": round(estimate.low), "high": round(estimate.high)}


def _rate(estimate: Estimate | None) -> dict[str, float] | None:
    if estimate is None:
        return None
    return {"value": round(estimate.value, 3), "low": round(estimate.low, 3), "high": round(estimate.high, 3)}
