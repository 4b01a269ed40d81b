"""Candidates that were ruled out, by prediction or by what others showed: on record in the study, and never as measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import optuna

from autotune.measurement import Outcome
from autotune.prediction import Prediction
from autotune.units import format_bytes

MOST_RECORDED = 12
"""So many are written as trials, those nearest to the limit; writing thousands would cost more than measuring one."""

PREDICTED, ALL_SCREENED, CANDIDATE_ID = "predicted", "screened", "candidate_id"
"""User attributes: of a trial, its predicted figures and whom it is about; of the study, how many candidates were ruled out."""


def recorded(study: optuna.Study) -> set[str]:
    """Ids of the candidates that are on record as screened."""
    return {
        trial.user_attrs[CANDIDATE_ID]
        for trial in study.get_trials(deepcopy=False)
        if trial.user_attrs.get("outcome") == str(Outcome.SCREENED) and CANDIDATE_ID in trial.user_attrs
    }


def nearest(names: Sequence[str], predictions: Mapping[str, Prediction]) -> list[str]:
    """Those that are predicted to come nearest to fitting, and no more than are worth writing down."""
    known = [name for name in names if name in predictions]
    return sorted(known, key=lambda name: predictions[name].peak_memory_bytes.low)[:MOST_RECORDED]


def figures(prediction: Prediction) -> dict[str, Any]:
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
    peak, limit = format_bytes(round(prediction.peak_memory_bytes.value)), format_bytes(prediction.limit_bytes)
    return f"screened: predicted to need {peak} of {limit}, and what was measured so far does not say otherwise"


def violation(prediction: Prediction) -> float:
    """How far above the limit it is at least, as a share of it."""
    return max(prediction.peak_memory_bytes.low / prediction.limit_bytes - 1, 0.01)
