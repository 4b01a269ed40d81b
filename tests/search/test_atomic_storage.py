"""Atomic trials: the same rows as Optuna's own, all or none, and written once despite retries."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event

from autotune.search.agenda import RemainingBudget
from autotune.search.loop import SHORT_PROBE, baseline_candidate, legal_candidates
from autotune.search.storage import IN_MEMORY, open_storage
from autotune.search.study import TrialRequest, open_study
from autotune.search.trial_storage import AtomicRDBStorage, TrialEnd, TrialStart, TrialWriter
from tests.simulated import MIB, Machine, ToyTrainer, toy_job, toy_space

DISTRIBUTIONS: dict[str, BaseDistribution] = {
    "batch": IntDistribution(1, 64, log=True),
    "share": FloatDistribution(0.1, 0.9),
    "engine": CategoricalDistribution(["vllm", None, True]),
}
PARAMS: dict[str, Any] = {"batch": 8, "share": 0.3, "engine": None}
ENTRY = TrialStart(
    params=PARAMS,
    distributions=DISTRIBUTIONS,
    attributes={"candidate": {"knobs": {"é": [1, 2.5, None]}}},
)
FITS = TrialEnd(
    state=TrialState.COMPLETE,
    attributes={"measurement": {"peak": 7}, "why": "it fits"},
    violations={"memory": -0.1},
    value=3.5,
)


def trials_in(url: str) -> TrialWriter:
    storage = open_storage(url)
    return TrialWriter(
        study=optuna.create_study(
            storage=storage,
            study_name="s",
            direction="maximize",
        ),
        storage=storage,
    )


@pytest.fixture(params=["memory", "file"])
def trials(request: pytest.FixtureRequest, tmp_path: Path) -> TrialWriter:
    return trials_in(IN_MEMORY if request.param == "memory" else f"sqlite:///{tmp_path}/study.db")


@pytest.fixture
def filed(tmp_path: Path) -> TrialWriter:
    return trials_in(f"sqlite:///{tmp_path}/study.db")


def written(trials: TrialWriter, end: TrialEnd = FITS) -> FrozenTrial:
    trial = trials.begin("me")
    trials.enter(trial, ENTRY)
    trials.end(trial, end)
    return trials.study.get_trials()[trial.number]


@pytest.mark.parametrize("state", [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL])
def test_the_rows_equal_those_that_optuna_writes(trials: TrialWriter, state: TrialState) -> None:
    value = 3.5 if state is TrialState.COMPLETE else None
    ours = written(
        trials,
        TrialEnd(
            state=state,
            attributes=FITS.attributes,
            violations=FITS.violations,
            value=value,
        ),
    )
    study = trials.study
    asked = study.ask()
    asked.set_user_attr("driver", "me")
    for name, distribution in DISTRIBUTIONS.items():
        inner = distribution.to_internal_repr(PARAMS[name])
        study._storage.set_trial_param(asked._trial_id, name, inner, distribution)
    for key, one in {**ENTRY.attributes, **FITS.attributes}.items():
        asked.set_user_attr(key, one)
    asked.set_constraint("memory", -0.1)
    study.tell(asked.number, value, state=state)
    theirs = study.get_trials()[asked.number]
    for part in (
        "state",
        "params",
        "distributions",
        "user_attrs",
        "system_attrs",
        "constraints",
        "values",
    ):
        assert getattr(ours, part) == getattr(theirs, part), part
    assert list(ours.params) == list(theirs.params)
    assert (
        ours.datetime_start
        and ours.datetime_complete
        and ours.datetime_start <= ours.datetime_complete
    )


def test_a_trial_names_its_driver_from_its_first_row(trials: TrialWriter) -> None:
    begun = [trials.begin("me") for _ in range(3)]
    there = trials.study.get_trials()
    assert [one.number for one in there] == [one.number for one in begun] == [0, 1, 2]
    assert all(
        one.state is TrialState.RUNNING and one.user_attrs == {"driver": "me"} for one in there
    )


def test_an_end_that_breaks_off_leaves_nothing_of_itself(filed: TrialWriter) -> None:
    trial, storage = filed.begin(None), filed.storage
    filed.enter(trial, ENTRY)
    assert isinstance(storage, AtomicRDBStorage)
    with _breaking(storage, "UPDATE trials"), pytest.raises(StorageInternalError):
        AtomicRDBStorage.end(storage, trial._trial_id, FITS)
    left = filed.study.get_trials()[0]
    assert left.state is TrialState.RUNNING and left.value is None and not left.constraints
    assert left.user_attrs == ENTRY.attributes
    filed.end(trial, FITS)
    assert filed.study.get_trials()[0].value == FITS.value


def test_an_entry_that_breaks_off_leaves_nothing_of_itself(filed: TrialWriter) -> None:
    trial = filed.begin("me")
    assert isinstance(filed.storage, AtomicRDBStorage)
    with (
        _breaking(filed.storage, "INSERT INTO trial_user_attributes"),
        pytest.raises(StorageInternalError),
    ):
        AtomicRDBStorage.enter(filed.storage, filed.study._study_id, trial._trial_id, ENTRY)
    left = filed.study.get_trials()[0]
    assert not left.params and left.user_attrs == {"driver": "me"}
    filed.enter(trial, ENTRY)
    assert filed.study.get_trials()[0].params == PARAMS


class _breaking:
    """A database that is lost at one kind of statement."""

    def __init__(self, storage: AtomicRDBStorage, statement: str) -> None:
        self._engine, self._statement = storage.engine, statement

    def _listen(self, connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith(self._statement):
            raise sqlite3.OperationalError("disk I/O error")

    def __enter__(self) -> None:
        event.listen(self._engine, "before_cursor_execute", self._listen)

    def __exit__(self, *raised: object) -> None:
        event.remove(self._engine, "before_cursor_execute", self._listen)


def test_an_end_whose_reply_was_lost_is_written_once(filed: TrialWriter) -> None:
    trial = filed.begin(None)
    filed.enter(trial, ENTRY)
    filed.enter(trial, ENTRY)
    filed.end(trial, FITS)
    before = filed.study.get_trials()
    filed.end(trial, FITS)
    assert filed.study.get_trials() == before and len(before) == 1


def test_a_different_end_by_another_driver_is_no_lost_reply(filed: TrialWriter) -> None:
    trial = filed.begin(None)
    filed.study.tell(trial.number, state=TrialState.FAIL)
    with pytest.raises(UpdateFinishedTrialError):
        filed.end(trial, FITS)
    assert (
        filed.study.get_trials()[0].state is TrialState.FAIL
        and not filed.study.get_trials()[0].user_attrs
    )
    filed.end(trial, TrialEnd(state=TrialState.FAIL))  # who has nothing to say is content


def test_new_rows_of_other_drivers_are_read_while_most_trials_run(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    mine = trials_in(url)
    running = [mine.begin("me") for _ in range(3)]
    for trial in running[1:]:
        mine.enter(trial, ENTRY)
    other = TrialWriter(
        study=optuna.load_study(study_name="s", storage=url), storage=open_storage(url)
    )

    def both() -> tuple[list[FrozenTrial], list[FrozenTrial]]:
        return mine.study.get_trials(), optuna.load_study(study_name="s", storage=url).get_trials()

    ours, there = both()
    assert ours == there and len(there) == 3
    other.end(running[2], FITS)  # as of one that was taken for dead
    other.enter(running[0], ENTRY)
    written(other)
    begun = other.begin("another")
    ours, there = both()
    assert ours == there and [one.state.name for one in there] == [
        "RUNNING",
        "RUNNING",
        "COMPLETE",
        "COMPLETE",
        "RUNNING",
    ]
    assert ours[0].params == PARAMS, "begun when it was read first, and entered since"
    other.enter(begun, ENTRY)
    mine.study.get_trials()
    optuna.load_study(study_name="s", storage=url)._storage.set_trial_system_attr(
        begun._trial_id, "note", "seen"
    )
    assert isinstance(mine.storage, AtomicRDBStorage)
    noted = mine.storage.get_all_trials(mine.study._study_id)[begun.number]
    assert noted.system_attrs["note"] == "seen", "who reads without a cache reads what is there"
    for trial in (running[0], running[1], begun):
        other.end(trial, TrialEnd(state=TrialState.FAIL, attributes={"why": "over"}))
    ours, there = both()
    assert ours == there and not any(one.state is TrialState.RUNNING for one in there)


def test_a_parameter_that_contradicts_the_study_is_refused(filed: TrialWriter) -> None:
    written(filed)
    other = TrialStart(
        params={"engine": "hf"},
        distributions={"engine": CategoricalDistribution(["hf"])},
        attributes={},
    )
    with pytest.raises(ValueError, match="does not support dynamic value space"):
        filed.enter(filed.begin(None), other)
    written(filed)


def test_a_probe_costs_its_driver_few_transactions(tmp_path: Path) -> None:
    machine, trainer = Machine(limit_bytes=2500 * MIB), ToyTrainer()
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    storage = study._writer.storage
    assert isinstance(storage, AtomicRDBStorage)
    asked_of_it = Counter[str]()
    event.listen(storage.engine, "commit", lambda connection: asked_of_it.update(["commit"]))
    event.listen(
        storage.engine, "before_cursor_execute", lambda *given: asked_of_it.update(["statement"])
    )
    for _ in range(2):  # the first may have to look up what the second knows
        asked_of_it.clear()
        asked = study.ask(RemainingBudget(seconds=1e9, probes=100))
        assert isinstance(asked, TrialRequest)
        study.tell(asked, machine.measure(asked.candidate, SHORT_PROBE))
    assert asked_of_it["commit"] <= 5, (
        "a trial, what it is about, a claim, its end, and the claim given back"
    )
    assert asked_of_it["statement"] <= 20
