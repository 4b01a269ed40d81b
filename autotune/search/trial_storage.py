"""Trials as Optuna's records: what is written of each, and what is read.

A measured trial has its candidate, purpose, measurement, outcome and reason as user attributes, in
the form of `core.answer.plain`, so that a study can be read without autotune. A screened candidate
is on record too, with its predicted figures and never as measured.

In the terms of Optuna:

    intermediate values   tokens per second of each timed cycle
    value                 their median
    constraints           MEMORY: need / limit - 1; VALIDITY: 1 if it failed for another reason
    COMPLETE              it fits
    PRUNED                it was stopped early, or a constraint is violated; samplers learn from it
    FAIL                  a fault of the machine or an interruption; samplers ignore it

Trials of a user's own objective have none of these attributes: their measurement is rebuilt from
parameters, value and constraints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.core.answer import Expected, Purpose, Trial
from autotune.core.errors import StudyMismatch
from autotune.core.measurement import Cost, Measurement, Memory, Outcome, Speed, judge
from autotune.core.plain_data import plain
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.core.units import format_bytes
from autotune.search.database_retry import ANOTHER_VERSION
from autotune.search.parameters import Parameters

# Attributes of a trial
CANDIDATE = "candidate"
PURPOSE = "purpose"
EXPECTED = "expected"
MEASUREMENT = "measurement"
OUTCOME = "outcome"
WHY = "why"
DRIVER = "driver"  # Name of the driver that began the trial, written with its first row
# Attributes of a screened trial
PREDICTED = "predicted"
CANDIDATE_ID = "candidate_id"
ALL_SCREENED = "screened"  # Attribute of the study: number of screened candidates
# Screened candidates to record, nearest to the limit first: thousands would take longer than a
# probe
MAX_SCREENED_RECORDS = 12
# Constraints of a trial. Each trial has both: GPSampler needs equal constraints.
MEMORY = "memory over the limit"
VALIDITY = "failed for another reason"
MIN_VIOLATION = 0.01
REBUILT_TOKENS = 1_000_000  # Tokens of a rebuilt cycle


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    state: TrialState
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constraints: Mapping[str, float] = field(default_factory=dict)
    rates: tuple[float, ...] = ()  # Tokens per second of each timed cycle
    value: float | None = None  # Of a complete trial


# 1. What is written.


def start_attributes(
    candidate: Candidate,
    purpose: Purpose,
    driver: str,
) -> dict[str, Any]:
    """Return what is written before the measurement, so that the trial of a killed driver names
    its candidate.
    """
    return {CANDIDATE: plain(candidate), PURPOSE: purpose, DRIVER: driver}


def measured_end(trial: Trial) -> TrialEnd:
    measurement = trial.measurement
    speed = trial.measurement.ranking_speed
    attributes = {
        MEASUREMENT: plain(measurement),
        OUTCOME: str(measurement.outcome),
        WHY: trial.verdict.why,
    }
    if trial.expected is not None:
        attributes[EXPECTED] = plain(trial.expected)
    if measurement.outcome is Outcome.INTERRUPTED:
        return TrialEnd(state=TrialState.FAIL, attributes=attributes)
    constraints = _constraints(measurement)
    pruned = TrialEnd(
        state=TrialState.PRUNED,
        attributes=attributes,
        constraints=constraints,
    )
    if not trial.verdict.fits or speed is None:
        return pruned
    timed = replace(pruned, rates=tuple(speed.rates))
    if speed.cut_short:
        slow = f"stopped early: too slow at {speed.tokens_per_second:,.0f} tokens/s"
        return replace(timed, attributes={**attributes, WHY: f"{slow}, {trial.verdict.why}"})
    return replace(timed, state=TrialState.COMPLETE, value=speed.tokens_per_second)


def _constraints(measurement: Measurement) -> dict[str, float]:
    """Return need / limit - 1, as a lower bound after an out-of-memory error, and whether the
    candidate failed otherwise.
    """
    memory = measurement.memory
    is_out_of_memory = measurement.outcome.is_out_of_memory
    needed_bytes: float = memory.peak_bytes or 0
    if is_out_of_memory:
        needed_bytes += measurement.requested_bytes
    excess = needed_bytes / memory.limit_bytes - 1
    if is_out_of_memory:
        excess = max(excess, MIN_VIOLATION)
    is_valid = measurement.outcome is Outcome.OK or is_out_of_memory
    return {MEMORY: excess, VALIDITY: float(not is_valid)}


def screened_end(candidate: Candidate, prediction: Prediction) -> TrialEnd:
    """Return the end of a trial whose candidate was ruled out by prediction."""
    peak = prediction.peak_memory_bytes
    limit_bytes = prediction.limit_bytes
    if prediction.failure is None:
        need = format_bytes(round(peak.value))
        why = (
            f"predicted to need {need} of {format_bytes(limit_bytes)}, not contradicted by"
            " measurements"
        )
    else:
        why = f"it would stop with: {prediction.failure}"
    predicted = {
        "peak_bytes": peak.value,
        "peak_bytes_low": peak.low,
        "peak_bytes_high": peak.high,
        "limit_bytes": limit_bytes,
    }
    attributes = {
        CANDIDATE_ID: candidate.id,
        PREDICTED: predicted,
        OUTCOME: str(Outcome.SCREENED),
        WHY: f"screened: {why}",
    }
    excess = peak.low / limit_bytes - 1
    return TrialEnd(
        state=TrialState.PRUNED,
        attributes=attributes,
        constraints={MEMORY: max(excess, MIN_VIOLATION), VALIDITY: 0.0},
    )


def failed_end(why: str) -> TrialEnd:
    """Return the end of a trial without an outcome of its candidate."""
    return TrialEnd(state=TrialState.FAIL, attributes={WHY: why})


# 2. Writing it.


def write_end(trial: optuna.Trial, end: TrialEnd) -> None:
    """Write all of the end but the state, which `Study.tell` and `Study.optimize` write last: a
    trial whose driver is killed in between holds its measurement.
    """
    for key, value in end.attributes.items():
        trial.set_user_attr(key, value)
    for cycle, rate in enumerate(end.rates):
        trial.report(rate, cycle)
    for name, amount in end.constraints.items():
        trial.set_constraint(name, amount)


def add_ended(
    study: optuna.Study,
    parameters: Parameters,
    candidate: Candidate,
    end: TrialEnd,
    start: Mapping[str, Any],
) -> None:
    """Add a trial that has ended already, at once."""
    trial = create_trial(
        state=end.state,
        params=parameters.of(candidate),
        distributions=parameters.distributions,
        user_attrs={**start, **end.attributes},
        intermediate_values=dict(enumerate(end.rates)),
        constraints=dict(end.constraints),
        value=end.value,
    )
    study.add_trial(trial)


# 3. What is read.


def candidate_of(frozen: FrozenTrial) -> Candidate | None:
    """Return the candidate as it was written before its measurement."""
    if CANDIDATE not in frozen.user_attrs:
        return None
    attributes = frozen.user_attrs[CANDIDATE]
    return Candidate(**attributes)


def read_trial(frozen: FrozenTrial) -> Trial | None:
    """Return the measured trial, or None if it has no measurement."""
    attributes = frozen.user_attrs
    if MEASUREMENT not in attributes:
        return None
    try:
        measurement = msgspec.convert(attributes[MEASUREMENT], Measurement)
        return Trial(
            number=frozen.number,
            purpose=attributes[PURPOSE],
            candidate=Candidate(**attributes[CANDIDATE]),
            measurement=measurement,
            verdict=judge(measurement),
            expected=msgspec.convert(attributes.get(EXPECTED), Expected | None),
        )
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise StudyMismatch(
            f"Trial {frozen.number} of the study was written by another version ({error}).",
            way_out=ANOTHER_VERSION,
        ) from error


def rebuilt_trial(
    frozen: FrozenTrial,
    candidate: Candidate,
    limit_bytes: int,
) -> Trial | None:
    """Return the trial of a user's own objective; None if it has no result."""
    # 1. What the objective reported.
    speed = _rebuilt_speed(frozen)
    outcome = _rebuilt_outcome(frozen)
    is_finished = frozen.state in (TrialState.COMPLETE, TrialState.PRUNED)
    has_result = speed is not None or outcome is not Outcome.OK
    if not is_finished or not has_result:
        return None

    # 2. The same as a measurement.
    peak_bytes = 0  # not stated, but it fits
    if MEMORY in frozen.constraints:
        excess = frozen.constraints[MEMORY]
        peak_bytes = round((1 + excess) * limit_bytes)
    seconds = 0.0
    if frozen.duration is not None:
        seconds = frozen.duration.total_seconds()
    memory = Memory(
        peak_bytes=peak_bytes,
        limit_bytes=limit_bytes,
        bound_by="objective",
    )
    measurement = Measurement(
        candidate_id=candidate.id,
        outcome=outcome,
        memory=memory,
        cost=Cost(total_seconds=seconds, load_seconds=0.0),
        worst=speed if outcome is Outcome.OK else None,
    )
    return Trial(
        number=frozen.number,
        purpose=frozen.user_attrs.get(PURPOSE, "search"),
        candidate=candidate,
        measurement=measurement,
        verdict=judge(measurement),
    )


def _rebuilt_outcome(frozen: FrozenTrial) -> Outcome:
    """Return what the constraints say: an amount above 0 violates one."""
    if frozen.constraints.get(MEMORY, 0.0) > 0:
        return Outcome.OOM_UNKNOWN
    if any(amount > 0 for amount in frozen.constraints.values()):
        return Outcome.CRASH
    return Outcome.OK


def _rebuilt_speed(frozen: FrozenTrial) -> Speed | None:
    """Return one cycle of many tokens for each reported value, or for the trial's value."""
    rates = [rate for _, rate in sorted(frozen.intermediate_values.items())]
    if not rates and frozen.value is not None:
        rates = [frozen.value]
    if not rates or min(rates) <= 0:
        return None
    return Speed(
        completion_tokens=0,
        cycle_seconds=tuple(REBUILT_TOKENS / rate for rate in rates),
        cycle_loss_tokens=(REBUILT_TOKENS,) * len(rates),
        prompt_tokens=0,
        phase_seconds={},
        cut_short=frozen.state is TrialState.PRUNED,
    )


def screened_ids(study: optuna.Study) -> set[str]:
    """Return the ids of the candidates on record as screened."""
    ids = set()
    for trial in study.get_trials(deepcopy=False):
        is_screened = trial.user_attrs.get(OUTCOME) == str(Outcome.SCREENED)
        if is_screened and CANDIDATE_ID in trial.user_attrs:
            ids.add(trial.user_attrs[CANDIDATE_ID])
    return ids
