"""Candidates that were ruled out by prediction: on record in the study, and never as measured."""

from __future__ import annotations

from collections.abc import Mapping

import optuna

from autotune.prediction import Prediction
from autotune.units import format_bytes

MOST_RECORDED = 200
"""So many are written as trials, those nearest to the limit; writing thousands would cost more than measuring one."""

PREDICTED, ALL_SCREENED = "predicted", "screened"
"""User attributes: of a trial, its predicted figures; of the study, how many candidates were ruled out in all."""


def to_record(study: optuna.Study, screened: Mapping[str, Prediction]) -> list[str]:
    """Ids of the candidates that are to be written now: the nearest to the limit, without those that are there already."""
    study.set_user_attr(ALL_SCREENED, len(screened))
    known = {trial.user_attrs.get("candidate_id") for trial in study.get_trials(deepcopy=False) if PREDICTED in trial.user_attrs}
    nearest = sorted(screened, key=lambda name: screened[name].peak_memory_bytes.low)[:MOST_RECORDED]
    return [name for name in nearest if name not in known]


def figures(prediction: Prediction) -> dict[str, float]:
    peak = prediction.peak_memory_bytes
    return {
        "peak_bytes": peak.value,
        "peak_bytes_low": peak.low,
        "peak_bytes_high": peak.high,
        "limit_bytes": prediction.limit_bytes,
    }


def why(prediction: Prediction) -> str:
    if prediction.failure is not None:
        return f"screened: it would stop with: {prediction.failure}"
    peak, limit = format_bytes(prediction.peak_memory_bytes.low), format_bytes(prediction.limit_bytes)
    return f"screened: predicted to need at least {peak} of {limit}"


def violation(prediction: Prediction) -> float:
    """How far above the limit it is at least, as a share of it."""
    return max(prediction.peak_memory_bytes.low / prediction.limit_bytes - 1, 0.01)
