"""Atomic trials: the same rows as Optuna's own, all or none, and written once despite retries."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
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
    frozen = written(
        trials,
        TrialEnd(
            state=state,
            attributes=FITS.attributes,
            violations=FITS.violations,
            value=value,
        ),
    )
    study = trials.study
    trial = study.ask()
    trial.set_user_attr("driver", "me")
    for name, distribution in DISTRIBUTIONS.items():
        inner = distribution.to_internal_repr(PARAMS[name])
        study._storage.set_trial_param(trial._trial_id, name, inner, distribution)
    for key, attribute in {**ENTRY.attributes, **FITS.attributes}.items():
        trial.set_user_attr(key, attribute)
    trial.set_constraint("memory", -0.1)
    study.tell(trial.number, value, state=state)
    expected = study.get_trials()[trial.number]
    for part in (
        "state",
        "params",
        "distributions",
        "user_attrs",
        "system_attrs",
        "constraints",
        "values",
    ):
        assert getattr(frozen, part) == getattr(expected, part), part
    assert list(frozen.params) == list(expected.params)
    assert frozen.datetime_start
    assert frozen.datetime_complete
    assert frozen.datetime_start <= frozen.datetime_complete


def numbers(trials: Iterable[FrozenTrial]) -> list[int]:
    return [trial.number for trial in trials]


def test_a_trial_names_its_driver_from_its_first_row(trials: TrialWriter) -> None:
    begun = [trials.begin("me") for _ in range(3)]
    stored = trials.study.get_trials()
    assert numbers(stored) == numbers(begun) == [0, 1, 2]
    for trial in stored:
        assert trial.state is TrialState.RUNNING
        assert trial.user_attrs == {"driver": "me"}


def test_an_end_that_breaks_off_leaves_nothing_of_itself(filed: TrialWriter) -> None:
    trial, storage = filed.begin(None), filed.storage
    filed.enter(trial, ENTRY)
    assert isinstance(storage, AtomicRDBStorage)
    with _breaking(storage, "UPDATE trials"), pytest.raises(StorageInternalError):
        AtomicRDBStorage.end(storage, trial._trial_id, FITS)
    frozen = filed.study.get_trials()[0]
    assert frozen.state is TrialState.RUNNING
    assert frozen.value is None
    assert not frozen.constraints
    assert frozen.user_attrs == ENTRY.attributes
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
    frozen = filed.study.get_trials()[0]
    assert not frozen.params
    assert frozen.user_attrs == {"driver": "me"}
    filed.enter(trial, ENTRY)
    assert filed.study.get_trials()[0].params == PARAMS


class _breaking:
    """A database that is lost at one kind of statement."""

    def __init__(self, storage: AtomicRDBStorage, statement: str) -> None:
        self._engine, self._statement = storage.engine, statement

    def _listen(self, connection: Any, cursor: Any, statement: str, *arguments: Any) -> None:
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
    assert filed.study.get_trials() == before
    assert len(before) == 1


def test_a_different_end_by_another_driver_is_no_lost_reply(filed: TrialWriter) -> None:
    trial = filed.begin(None)
    filed.study.tell(trial.number, state=TrialState.FAIL)
    with pytest.raises(UpdateFinishedTrialError):
        filed.end(trial, FITS)
    assert filed.study.get_trials()[0].state is TrialState.FAIL
    assert not filed.study.get_trials()[0].user_attrs
    filed.end(trial, TrialEnd(state=TrialState.FAIL))  # who has nothing to say is content


def test_new_rows_of_other_drivers_are_read_while_most_trials_run(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    writer = trials_in(url)
    running = [writer.begin("me") for _ in range(3)]
    for trial in running[1:]:
        writer.enter(trial, ENTRY)
    other_writer = TrialWriter(
        study=optuna.load_study(study_name="s", storage=url), storage=open_storage(url)
    )

    def trial_lists() -> tuple[list[FrozenTrial], list[FrozenTrial]]:
        return writer.study.get_trials(), optuna.load_study(
            study_name="s", storage=url
        ).get_trials()

    cached, loaded = trial_lists()
    assert cached == loaded
    assert len(loaded) == 3
    other_writer.end(running[2], FITS)  # as of one that was taken for dead
    other_writer.enter(running[0], ENTRY)
    written(other_writer)
    begun = other_writer.begin("another")
    cached, loaded = trial_lists()
    assert cached == loaded
    assert [trial.state.name for trial in loaded] == [
        "RUNNING",
        "RUNNING",
        "COMPLETE",
        "COMPLETE",
        "RUNNING",
    ]
    assert cached[0].params == PARAMS, "begun when it was read first, and entered since"
    other_writer.enter(begun, ENTRY)
    writer.study.get_trials()
    optuna.load_study(study_name="s", storage=url)._storage.set_trial_system_attr(
        begun._trial_id, "note", "seen"
    )
    assert isinstance(writer.storage, AtomicRDBStorage)
    noted = writer.storage.get_all_trials(writer.study._study_id)[begun.number]
    assert noted.system_attrs["note"] == "seen", "who reads without a cache reads what is there"
    for trial in (running[0], running[1], begun):
        other_writer.end(trial, TrialEnd(state=TrialState.FAIL, attributes={"why": "over"}))
    cached, loaded = trial_lists()
    assert cached == loaded
    for trial in loaded:
        assert trial.state is not TrialState.RUNNING


def test_a_parameter_that_contradicts_the_study_is_refused(filed: TrialWriter) -> None:
    written(filed)
    start = TrialStart(
        params={"engine": "hf"},
        distributions={"engine": CategoricalDistribution(["hf"])},
        attributes={},
    )
    with pytest.raises(ValueError, match="does not support dynamic value space"):
        filed.enter(filed.begin(None), start)
    written(filed)


def test_a_probe_costs_its_driver_few_transactions(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    trainer = ToyTrainer()
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    storage = study._writer.storage
    assert isinstance(storage, AtomicRDBStorage)
    asked_of_it = Counter[str]()
    event.listen(storage.engine, "commit", lambda connection: asked_of_it.update(["commit"]))
    event.listen(
        storage.engine,
        "before_cursor_execute",
        lambda *arguments: asked_of_it.update(["statement"]),
    )
    for _ in range(2):  # the first may have to look up what the second knows
        asked_of_it.clear()
        request = study.ask(RemainingBudget(seconds=1e9, probes=100))
        assert isinstance(request, TrialRequest)
        study.tell(request, machine.measure(request.candidate, SHORT_PROBE))
    assert asked_of_it["commit"] <= 5, (
        "a trial, what it is about, a claim, its end, and the claim given back"
    )
    assert asked_of_it["statement"] <= 20
