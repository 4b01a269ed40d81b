"""Trials in Optuna's storage: JSON in user attributes, so that a study can be read without
autotune.

A measured trial has its candidate, purpose, measurement, outcome and reason, in the form of
`core.answer.plain`. A screened candidate is on record too, with its predicted figures and never as
measured.
"""

from __future__ import annotations

from typing import Any

import msgspec
import optuna
from optuna.trial import FrozenTrial

from autotune.core.answer import Expected, Trial, plain
from autotune.core.measurement import Measurement, Outcome, judge
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.core.units import format_bytes

CANDIDATE, PURPOSE, EXPECTED, MEASUREMENT, OUTCOME, WHY = "candidate", "purpose", "expected", "measurement", "outcome", "why"
DRIVER = "driver"  # Name of the driver that began the trial, written with its first row
PREDICTED, CANDIDATE_ID = "predicted", "candidate_id"  # Attributes of a screened trial
ALL_SCREENED = "screened"  # Attribute of the study: number of screened candidates
MAX_SCREENED_RECORDS = 12  # Screened candidates to record, nearest to the limit first: thousands would take longer than a probe


def measured_attributes(trial: Trial) -> dict[str, Any]:
    """Return the attributes written after the measurement."""
    found = {MEASUREMENT: plain(trial.measurement), OUTCOME: str(trial.measurement.outcome), WHY: trial.verdict.why}
    return found if trial.expected is None else {**found, EXPECTED: plain(trial.expected)}


def screened_attributes(candidate: Candidate, prediction: Prediction) -> dict[str, Any]:
    """Return the attributes of a candidate that was ruled out by prediction."""
    peak, limit_bytes = prediction.peak_memory_bytes, prediction.limit_bytes
    need = f"predicted to need {format_bytes(round(peak.value))} of {format_bytes(limit_bytes)}, not contradicted by measurements"
    return {
        CANDIDATE_ID: candidate.id,
        PREDICTED: {
            "peak_bytes": peak.value, "peak_bytes_low": peak.low, "peak_bytes_high": peak.high, "limit_bytes": limit_bytes
        },
        OUTCOME: str(Outcome.SCREENED),
        WHY: f"screened: {need if prediction.failure is None else f'it would stop with: {prediction.failure}'}",
    }  # fmt: skip


def read_trial(frozen: FrozenTrial) -> Trial | None:
    """Return the measured trial, or None if it has no measurement."""
    attributes = frozen.user_attrs
    if MEASUREMENT not in attributes:
        return None
    measurement = msgspec.convert(attributes[MEASUREMENT], Measurement)
    return Trial(
        number=frozen.number, purpose=attributes[PURPOSE], candidate=Candidate(**attributes[CANDIDATE]), measurement=measurement,
        verdict=judge(measurement), expected=msgspec.convert(attributes.get(EXPECTED), Expected | None),
    )  # fmt: skip


def trials_of(study: optuna.Study) -> tuple[Trial, ...]:
    """Return all measured trials."""
    found = (read_trial(frozen) for frozen in study.get_trials(deepcopy=False))
    return tuple(trial for trial in found if trial is not None)


def screened_ids(study: optuna.Study) -> set[str]:
    """Return the ids of the candidates on record as screened."""
    return {
        trial.user_attrs[CANDIDATE_ID]
        for trial in study.get_trials(deepcopy=False)
        if trial.user_attrs.get(OUTCOME) == str(Outcome.SCREENED) and CANDIDATE_ID in trial.user_attrs
    }
