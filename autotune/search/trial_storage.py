"""Trials in Optuna's storage: what is written of each, and storages that write it atomically.

A trial is JSON in user attributes, so that a study can be read without autotune. A measured trial
has its candidate, purpose, measurement, outcome and reason, in the form of `core.answer.plain`. A
screened candidate is on record too, with its predicted figures and never as measured.

Outcomes in the terms of Optuna's samplers: a candidate that fits is COMPLETE with its speed; one
that ran out of memory, or over the limit, is PRUNED with its constraint violated, which TPE learns
from; a fault of the machine is FAIL, which samplers ignore.

One transaction writes a trial's description, one its end. Optuna reads the trial, writes one row
and commits for every parameter and attribute. For the dozen of a probe that was most of the
driver's time, and a killed driver left partial trials. The rows are the same as Optuna's.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import optuna
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.storages import InMemoryStorage, RDBStorage
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import insert, or_, select
from sqlalchemy.orm import Session

from autotune.core.answer import Expected, Purpose, Trial, plain
from autotune.core.errors import StudyMismatch
from autotune.core.measurement import Measurement, Outcome, judge
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.core.units import format_bytes
from autotune.search.database_retry import ANOTHER_VERSION

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
_CONSTRAINT = "memory over the limit"
# Violation by a candidate that failed for another reason than memory: as if it needed twice the
# limit
_NOT_MEMORY = 1.0
_MIN_VIOLATION = 0.01


@dataclass(frozen=True, kw_only=True)
class TrialStart:
    params: Mapping[str, Any]
    distributions: Mapping[str, BaseDistribution]
    attributes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TrialEnd:
    state: TrialState
    attributes: Mapping[str, Any] = field(default_factory=dict)
    # by constraint, as in `Trial.set_constraint`
    violations: Mapping[str, float] = field(default_factory=dict)
    value: float | None = None

    @property
    def system_attributes(self) -> dict[str, float]:
        attributes = {}
        for name, amount in self.violations.items():
            attributes[f"{_CONSTRAINTS_KEY}:{name}"] = amount
        return attributes


# 1. What is written.


def trial_start(
    candidate: Candidate,
    purpose: Purpose,
    distributions: Mapping[str, BaseDistribution],
) -> TrialStart:
    params = {}
    for name, value in candidate.knobs.items():
        if name in distributions:
            params[name] = value
    attributes = {CANDIDATE: plain(candidate), PURPOSE: purpose}
    return TrialStart(
        params=params,
        distributions=distributions,
        attributes=attributes,
    )


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
    state = TrialState.PRUNED
    value = None
    if trial.verdict.fits and speed is not None:
        state = TrialState.COMPLETE
        value = speed.tokens_per_second
    violations = {_CONSTRAINT: _violation(measurement)}
    return TrialEnd(
        state=state,
        attributes=attributes,
        violations=violations,
        value=value,
    )


def _violation(measurement: Measurement) -> float:
    """Return need / limit - 1, as a lower bound after an out-of-memory error; at most 0 for a
    candidate that fits.
    """
    memory = measurement.memory
    outcome = measurement.outcome
    peak_bytes = memory.peak_bytes or 0
    if outcome is Outcome.OK:
        return peak_bytes / memory.limit_bytes - 1
    if not outcome.is_out_of_memory:
        return _NOT_MEMORY
    needed_bytes = peak_bytes + measurement.requested_bytes
    excess = needed_bytes / memory.limit_bytes - 1
    return max(excess, _MIN_VIOLATION)


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
    violations = {_CONSTRAINT: max(excess, _MIN_VIOLATION)}
    return TrialEnd(
        state=TrialState.PRUNED,
        attributes=attributes,
        violations=violations,
    )


def failed_end(why: str) -> TrialEnd:
    """Return the end of a trial without an outcome of its candidate."""
    return TrialEnd(state=TrialState.FAIL, attributes={WHY: why})


# 2. What is read.


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


def trials_of(study: optuna.Study) -> tuple[Trial, ...]:
    trials = []
    for frozen in study.get_trials(deepcopy=False):
        trial = read_trial(frozen)
        if trial is not None:
            trials.append(trial)
    return tuple(trials)


def screened_ids(study: optuna.Study) -> set[str]:
    """Return the ids of the candidates on record as screened."""
    ids = set()
    for trial in study.get_trials(deepcopy=False):
        is_screened = trial.user_attrs.get(OUTCOME) == str(Outcome.SCREENED)
        if is_screened and CANDIDATE_ID in trial.user_attrs:
            ids.add(trial.user_attrs[CANDIDATE_ID])
    return ids


# 3. Storages.


class AtomicMemoryStorage(InMemoryStorage):
    """Storage in this process's own memory: nothing comes between two writes."""

    def begin(self, study_id: int, attributes: Mapping[str, Any]) -> FrozenTrial:
        trial_id = self.create_new_trial(study_id, _running(attributes))
        return self.get_trial(trial_id)

    def enter(
        self,
        study_id: int,
        trial_id: int,
        entry: TrialStart,
    ) -> None:
        for name, value in entry.params.items():
            distribution = entry.distributions[name]
            internal_value = distribution.to_internal_repr(value)
            self.set_trial_param(trial_id, name, internal_value, distribution)
        for key, value in entry.attributes.items():
            self.set_trial_user_attr(trial_id, key, value)

    def end(self, trial_id: int, end: TrialEnd) -> None:
        for key, value in end.attributes.items():
            self.set_trial_user_attr(trial_id, key, value)
        for key, violation in end.system_attributes.items():
            self.set_trial_system_attr(trial_id, key, violation)
        values = None if end.value is None else [end.value]
        self.set_trial_state_values(trial_id, end.state, values)


class AtomicRDBStorage(RDBStorage):
    """Database storage: each method writes all or nothing, and may be repeated if its reply was
    lost.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # Distributions that were checked against the study's, which Optuna repeats for each
        # parameter.
        self._compatible: dict[tuple[int, str], BaseDistribution] = {}
        # Running trials as last read: a described trial does not change until it ends.
        self._running: dict[int, FrozenTrial] = {}

    def begin(self, study_id: int, attributes: Mapping[str, Any]) -> FrozenTrial:
        return self._create_new_trial(study_id, _running(attributes))

    def enter(
        self,
        study_id: int,
        trial_id: int,
        entry: TrialStart,
    ) -> None:
        # If only the reply to an earlier try was lost, the rows exist already: that error is
        # ignored.
        with _create_scoped_session(self.scoped_session, ignore_integrity_error=True) as session:
            rows = []
            for name, value in entry.params.items():
                distribution = entry.distributions[name]
                internal_value = distribution.to_internal_repr(value)
                if self._compatible.get((study_id, name)) != distribution:
                    self._set_trial_param_without_commit(
                        session, trial_id, name, internal_value, distribution
                    )
                    self._compatible[study_id, name] = distribution
                    continue
                row = {
                    "trial_id": trial_id,
                    "param_name": name,
                    "param_value": internal_value,
                    "distribution_json": distribution_to_json(distribution),
                }
                rows.append(row)
            if rows:
                session.execute(insert(models.TrialParamModel), rows)
            _insert(session, models.TrialUserAttributeModel, trial_id, entry.attributes)

    def end(self, trial_id: int, end: TrialEnd) -> None:
        with _create_scoped_session(self.scoped_session) as session:
            trial: Any = models.TrialModel.find_or_raise_by_id(trial_id, session, for_update=True)
            is_finished = trial.state.is_finished()
            if is_finished and _has_attributes(session, trial_id, end.attributes):
                return  # written before: only the reply was lost
            self.check_trial_is_updatable(trial_id, trial.state)
            _insert(session, models.TrialUserAttributeModel, trial_id, end.attributes)
            _insert(session, models.TrialSystemAttributeModel, trial_id, end.system_attributes)
            if end.value is not None:
                self._set_trial_value_without_commit(session, trial, 0, end.value)
            trial.state = end.state
            trial.datetime_complete = datetime.now()

    def _get_trials(
        self,
        study_id: int,
        states: Container[TrialState] | None,
        included_trial_ids: set[int],
        trial_id_greater_than: int,
    ) -> list[FrozenTrial]:
        """Read all trials except unchanged running ones: Optuna's cache reads every running
        trial again each time.
        """
        # 1. Find the running trials that are unchanged. Without a cache, everything is read.
        unchanged: dict[int, FrozenTrial] = {}
        if self._running and included_trial_ids and states is None:
            current = self._states(study_id, included_trial_ids, trial_id_greater_than)
            for trial_id, trial in self._running.items():
                if current.get(trial_id) is TrialState.RUNNING:
                    unchanged[trial_id] = trial
            if unchanged:
                included_trial_ids = current.keys() - unchanged.keys()
                trial_id_greater_than = max(current)

        # 2. Read the others.
        trials = super()._get_trials(study_id, states, included_trial_ids, trial_id_greater_than)
        self._running = dict(unchanged)
        for trial in trials:
            is_running = trial.state is TrialState.RUNNING
            if is_running and trial.params:
                self._running[trial._trial_id] = trial

        def trial_number(trial: FrozenTrial) -> int:
            return trial._trial_id

        return sorted([*unchanged.values(), *trials], key=trial_number)

    def _states(
        self,
        study_id: int,
        included: set[int],
        greater_than: int,
    ) -> dict[int, TrialState]:
        """Return the states of the trials that Optuna would read."""
        trial = models.TrialModel
        is_newer = trial.trial_id > greater_than
        is_read = or_(is_newer, trial.trial_id.in_(included))
        of_study = trial.study_id == study_id
        query = select(trial.trial_id, trial.state).where(of_study, is_read)
        with _create_scoped_session(self.scoped_session) as session:
            rows = session.execute(query)
            return {row.trial_id: row.state for row in rows}


@dataclass(frozen=True, kw_only=True)
class TrialWriter:
    """Writes the trials of one study. Optuna's queue is not used: the agenda selects the next
    candidate.
    """

    study: optuna.Study
    storage: AtomicMemoryStorage | AtomicRDBStorage

    def begin(self, driver: str | None) -> FrozenTrial:
        """Create a running trial; its description is written later."""
        self._forget_cached_trials()
        attributes = {} if driver is None else {DRIVER: driver}
        return self.storage.begin(self.study._study_id, attributes)

    def enter(self, trial: FrozenTrial, entry: TrialStart) -> None:
        study_id = self.study._study_id
        self.storage.enter(study_id, trial._trial_id, entry)

    def end(self, trial: FrozenTrial, end: TrialEnd) -> None:
        """Write the end; UpdateFinishedTrialError if another driver ended the trial differently."""
        self._forget_cached_trials()
        self.storage.end(trial._trial_id, end)

    def _forget_cached_trials(self) -> None:
        """Let samplers read all trials again, once per new one."""
        self.study._thread_local.cached_all_trials = None


def _running(attributes: Mapping[str, Any]) -> FrozenTrial:
    return create_trial(state=TrialState.RUNNING, user_attrs=dict(attributes))


def _insert(
    session: Session,
    model: Any,
    trial_id: int,
    attributes: Mapping[str, Any],
) -> None:
    rows = []
    for key, value in attributes.items():
        value_json = json.dumps(value)
        rows.append({"trial_id": trial_id, "key": key, "value_json": value_json})
    if rows:
        session.execute(insert(model), rows)


def _has_attributes(
    session: Session,
    trial_id: int,
    attributes: Mapping[str, Any],
) -> bool:
    """Return True if the trial has all of these attributes, which only this driver could have
    written.
    """
    model = models.TrialUserAttributeModel
    of_trial = model.trial_id == trial_id
    query = select(model.key, model.value_json).where(of_trial)
    rows = session.execute(query)
    written = {row.key: row.value_json for row in rows}
    expected = {key: json.dumps(value) for key, value in attributes.items()}
    return expected.items() <= written.items()
