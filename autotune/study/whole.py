"""Storages in which a trial is written whole: all that it is about in one transaction, and all of its end in another.

Optuna writes each parameter and each attribute by itself: it reads the trial, writes a row and commits. For the dozen that a
probe has, that was most of what a probe cost its driver, and a driver that was killed left some of them. The rows here are
the same.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution, distribution_to_json
from optuna.storages import InMemoryStorage, RDBStorage
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _create_scoped_session
from optuna.study._constrained_optimization import _CONSTRAINTS_KEY
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy import insert, or_, select
from sqlalchemy.orm import Session


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a trial is about, once that is settled."""

    params: Mapping[str, Any]
    distributions: Mapping[str, BaseDistribution]
    attributes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class End:
    """What became of it."""

    state: TrialState
    attributes: Mapping[str, Any] = field(default_factory=dict)
    violations: Mapping[str, float] = field(default_factory=dict)
    """By constraint, as `Trial.set_constraint` has it."""

    value: float | None = None

    @property
    def system_attributes(self) -> dict[str, float]:
        return {f"{_CONSTRAINTS_KEY}:{name}": violation for name, violation in self.violations.items()}


class WholeStorage(Protocol):
    """What is asked of a storage beside what Optuna asks."""

    def begin(self, study_id: int, attributes: Mapping[str, Any]) -> FrozenTrial:
        """One that runs, and says so much from its first moment."""
        ...

    def enter(self, study_id: int, trial_id: int, entry: Entry) -> None:
        """All of it or nothing; may be called again when the answer was lost."""
        ...

    def end(self, trial_id: int, end: End) -> None:
        """All of it or nothing; may be called again when the answer was lost. UpdateFinishedTrialError where another ended it."""
        ...


class WholeMemory(InMemoryStorage):
    """Nothing can come between two writes to this process's own memory."""

    def begin(self, study_id: int, attributes: Mapping[str, Any]) -> FrozenTrial:
        return self.get_trial(self.create_new_trial(study_id, _running(attributes)))

    def enter(self, study_id: int, trial_id: int, entry: Entry) -> None:
        for name, value in entry.params.items():
            distribution = entry.distributions[name]
            self.set_trial_param(trial_id, name, distribution.to_internal_repr(value), distribution)
        for key, one in entry.attributes.items():
            self.set_trial_user_attr(trial_id, key, one)

    def end(self, trial_id: int, end: End) -> None:
        for key, value in end.attributes.items():
            self.set_trial_user_attr(trial_id, key, value)
        for key, violation in end.system_attributes.items():
            self.set_trial_system_attr(trial_id, key, violation)
        self.set_trial_state_values(trial_id, end.state, None if end.value is None else [end.value])


class WholeRDB(RDBStorage):
    """A database: a trial's attributes go there as rows of one statement."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._agreed: dict[tuple[int, str], BaseDistribution] = {}
        """Distributions that go together with what a study has already, which Optuna looks up for each parameter anew."""
        self._running: dict[int, FrozenTrial] = {}
        """Trials that run, as they were read: who has said what it is about says nothing more until it ends."""

    def begin(self, study_id: int, attributes: Mapping[str, Any]) -> FrozenTrial:
        return self._create_new_trial(study_id, _running(attributes))

    def enter(self, study_id: int, trial_id: int, entry: Entry) -> None:
        # A second time, where only the answer to the first was lost, the rows are there: that is what is let pass.
        with _create_scoped_session(self.scoped_session, ignore_integrity_error=True) as session:
            self._enter_params(session, study_id, trial_id, entry)
            _insert(session, models.TrialUserAttributeModel, trial_id, entry.attributes)

    def _enter_params(self, session: Session, study_id: int, trial_id: int, entry: Entry) -> None:
        rows = []
        for name, value in entry.params.items():
            distribution = entry.distributions[name]
            inner = distribution.to_internal_repr(value)
            if self._agreed.get((study_id, name)) != distribution:
                self._set_trial_param_without_commit(session, trial_id, name, inner, distribution)
                self._agreed[study_id, name] = distribution
                continue
            as_json = distribution_to_json(distribution)
            rows.append({"trial_id": trial_id, "param_name": name, "param_value": inner, "distribution_json": as_json})
        if rows:
            session.execute(insert(models.TrialParamModel), rows)

    def end(self, trial_id: int, end: End) -> None:
        with _create_scoped_session(self.scoped_session) as session:
            trial: Any = models.TrialModel.find_or_raise_by_id(trial_id, session, for_update=True)
            if trial.state.is_finished() and _says(session, trial_id, end.attributes):
                return  # told before: only the answer was lost
            self.check_trial_is_updatable(trial_id, trial.state)
            _insert(session, models.TrialUserAttributeModel, trial_id, end.attributes)
            _insert(session, models.TrialSystemAttributeModel, trial_id, end.system_attributes)
            if end.value is not None:
                self._set_trial_value_without_commit(session, trial, 0, end.value)
            trial.state, trial.datetime_complete = end.state, datetime.now()

    def _get_trials(
        self, study_id: int, states: Container[TrialState] | None, included_trial_ids: set[int], trial_id_greater_than: int
    ) -> list[FrozenTrial]:
        """With many slots that many trials run, and Optuna's cache reads them all again, each time, for the few that ended."""
        again = self._running and included_trial_ids and states is None  # whoever has no cache is given what is there now
        now = self._states(study_id, included_trial_ids, trial_id_greater_than) if again else {}
        still = {number: trial for number, trial in self._running.items() if now.get(number) is TrialState.RUNNING}
        if still:
            included_trial_ids, trial_id_greater_than = now.keys() - still.keys(), max(now)
        read = super()._get_trials(study_id, states, included_trial_ids, trial_id_greater_than)
        running = {trial._trial_id: trial for trial in read if trial.state is TrialState.RUNNING and trial.params}
        self._running = {**still, **running}
        return sorted([*still.values(), *read], key=lambda trial: trial._trial_id)

    def _states(self, study_id: int, included: set[int], greater_than: int) -> dict[int, TrialState]:
        """Of those that Optuna would read."""
        trial = models.TrialModel
        meant = or_(trial.trial_id > greater_than, trial.trial_id.in_(included))
        with _create_scoped_session(self.scoped_session) as session:
            found = session.execute(select(trial.trial_id, trial.state).where(trial.study_id == study_id, meant))
            return {row.trial_id: row.state for row in found}


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Those of one study, as they are written. Nothing is ever queued: which candidate is next is ours to say."""

    study: optuna.Study
    storage: WholeStorage

    def begin(self, attributes: Mapping[str, Any]) -> FrozenTrial:
        """A trial that runs. What it is about may still be chosen."""
        self.study._thread_local.cached_all_trials = None  # Optuna's samplers look at all trials once for each new one
        return self.storage.begin(self.study._study_id, attributes)

    def enter(self, trial: FrozenTrial, entry: Entry) -> None:
        self.storage.enter(self.study._study_id, trial._trial_id, entry)

    def end(self, trial: FrozenTrial, end: End) -> None:
        """No sampler of ours wants to hear of it. UpdateFinishedTrialError where somebody ended it otherwise."""
        self.study._thread_local.cached_all_trials = None
        self.storage.end(trial._trial_id, end)


def _running(attributes: Mapping[str, Any]) -> FrozenTrial:
    return create_trial(state=TrialState.RUNNING, user_attrs=dict(attributes))


def _insert(session: Session, model: Any, trial_id: int, attributes: Mapping[str, Any]) -> None:
    rows = [{"trial_id": trial_id, "key": key, "value_json": json.dumps(value)} for key, value in attributes.items()]
    if rows:
        session.execute(insert(model), rows)


def _says(session: Session, trial_id: int, attributes: Mapping[str, Any]) -> bool:
    """Whether the trial has all of these already, which nobody else could have said of it."""
    mine = models.TrialUserAttributeModel
    there = session.execute(select(mine.key, mine.value_json).where(mine.trial_id == trial_id))
    said = {row.key: row.value_json for row in there}
    return all(said.get(key) == json.dumps(value) for key, value in attributes.items())
