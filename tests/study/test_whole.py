"""Trials that are written whole: the same rows as Optuna's own, all of them or none, and told once however often it is tried."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import StorageInternalError, UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import event

from autotune.study import Asked, Means, open_study
from autotune.study.storage import IN_MEMORY, open_storage
from autotune.study.whole import End, Entry, Trials, WholeRDB
from autotune.tune import SHORT, baseline_candidate, legal_candidates
from tests.simulated import MIB, Machine, ToyTrainer, toy_question, toy_space

DISTRIBUTIONS: dict[str, BaseDistribution] = {
    "batch": IntDistribution(1, 64, log=True),
    "share": FloatDistribution(0.1, 0.9),
    "engine": CategoricalDistribution(["vllm", None, True]),
}
PARAMS: dict[str, Any] = {"batch": 8, "share": 0.3, "engine": None}
ENTRY = Entry(params=PARAMS, distributions=DISTRIBUTIONS, attributes={"candidate": {"knobs": {"é": [1, 2.5, None]}}})
FITS = End(
    state=TrialState.COMPLETE, attributes={"measurement": {"peak": 7}, "why": "it fits"}, violations={"memory": -0.1}, value=3.5
)


def trials_in(url: str) -> Trials:
    storage = open_storage(url)
    return Trials(study=optuna.create_study(storage=storage, study_name="s", direction="maximize"), storage=storage)


@pytest.fixture(params=["memory", "file"])
def trials(request: pytest.FixtureRequest, tmp_path: Path) -> Trials:
    return trials_in(IN_MEMORY if request.param == "memory" else f"sqlite:///{tmp_path}/study.db")


@pytest.fixture
def filed(tmp_path: Path) -> Trials:
    return trials_in(f"sqlite:///{tmp_path}/study.db")


def written(trials: Trials, end: End = FITS) -> FrozenTrial:
    trial = trials.begin({"driver": "me"})
    trials.enter(trial, ENTRY)
    trials.end(trial, end)
    return trials.study.get_trials()[trial.number]


@pytest.mark.parametrize("state", [TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL])
def test_what_is_read_is_what_optunas_own_way_of_writing_leaves(trials: Trials, state: TrialState) -> None:
    value = 3.5 if state is TrialState.COMPLETE else None
    ours = written(trials, End(state=state, attributes=FITS.attributes, violations=FITS.violations, value=value))
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
    for part in ("state", "params", "distributions", "user_attrs", "system_attrs", "constraints", "values"):
        assert getattr(ours, part) == getattr(theirs, part), part
    assert list(ours.params) == list(theirs.params)
    assert ours.datetime_start and ours.datetime_complete and ours.datetime_start <= ours.datetime_complete


def test_a_trial_runs_and_says_whose_it_is_from_its_first_moment(trials: Trials) -> None:
    begun = [trials.begin({"driver": "me"}) for _ in range(3)]
    there = trials.study.get_trials()
    assert [one.number for one in there] == [one.number for one in begun] == [0, 1, 2]
    assert all(one.state is TrialState.RUNNING and one.user_attrs == {"driver": "me"} for one in there)


def test_an_end_that_breaks_off_leaves_nothing_of_itself(filed: Trials) -> None:
    trial, storage = filed.begin({}), filed.storage
    filed.enter(trial, ENTRY)
    assert isinstance(storage, WholeRDB)
    with _breaking(storage, "UPDATE trials"), pytest.raises(StorageInternalError):
        WholeRDB.end(storage, trial._trial_id, FITS)
    left = filed.study.get_trials()[0]
    assert left.state is TrialState.RUNNING and left.value is None and not left.constraints
    assert left.user_attrs == ENTRY.attributes
    filed.end(trial, FITS)
    assert filed.study.get_trials()[0].value == FITS.value


def test_an_entry_that_breaks_off_leaves_nothing_of_itself(filed: Trials) -> None:
    trial = filed.begin({"driver": "me"})
    assert isinstance(filed.storage, WholeRDB)
    with _breaking(filed.storage, "INSERT INTO trial_user_attributes"), pytest.raises(StorageInternalError):
        WholeRDB.enter(filed.storage, filed.study._study_id, trial._trial_id, ENTRY)
    left = filed.study.get_trials()[0]
    assert not left.params and left.user_attrs == {"driver": "me"}
    filed.enter(trial, ENTRY)
    assert filed.study.get_trials()[0].params == PARAMS


class _breaking:
    """A database that is lost at one kind of statement."""

    def __init__(self, storage: WholeRDB, statement: str) -> None:
        self._engine, self._statement = storage.engine, statement

    def _listen(self, connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        if statement.startswith(self._statement):
            raise sqlite3.OperationalError("disk I/O error")

    def __enter__(self) -> None:
        event.listen(self._engine, "before_cursor_execute", self._listen)

    def __exit__(self, *raised: object) -> None:
        event.remove(self._engine, "before_cursor_execute", self._listen)


def test_an_end_whose_answer_was_lost_is_told_once(filed: Trials) -> None:
    trial = filed.begin({})
    filed.enter(trial, ENTRY)
    filed.enter(trial, ENTRY)
    filed.end(trial, FITS)
    before = filed.study.get_trials()
    filed.end(trial, FITS)
    assert filed.study.get_trials() == before and len(before) == 1


def test_an_end_that_another_told_otherwise_is_no_lost_answer(filed: Trials) -> None:
    trial = filed.begin({})
    filed.study.tell(trial.number, state=TrialState.FAIL)
    with pytest.raises(UpdateFinishedTrialError):
        filed.end(trial, FITS)
    assert filed.study.get_trials()[0].state is TrialState.FAIL and not filed.study.get_trials()[0].user_attrs
    filed.end(trial, End(state=TrialState.FAIL))  # who has nothing to say is content


def test_what_others_wrote_meanwhile_is_read_though_most_trials_still_run(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"
    mine = trials_in(url)
    running = [mine.begin({"driver": "me"}) for _ in range(3)]
    for trial in running[1:]:
        mine.enter(trial, ENTRY)
    other = Trials(study=optuna.load_study(study_name="s", storage=url), storage=open_storage(url))

    def both() -> tuple[list[FrozenTrial], list[FrozenTrial]]:
        return mine.study.get_trials(), optuna.load_study(study_name="s", storage=url).get_trials()

    ours, there = both()
    assert ours == there and len(there) == 3
    other.end(running[2], FITS)  # as of one that was taken for dead
    other.enter(running[0], ENTRY)
    written(other)
    begun = other.begin({"driver": "another"})
    ours, there = both()
    assert ours == there and [one.state.name for one in there] == ["RUNNING", "RUNNING", "COMPLETE", "COMPLETE", "RUNNING"]
    assert ours[0].params == PARAMS, "begun when it was read first, and entered since"
    other.enter(begun, ENTRY)
    mine.study.get_trials()
    optuna.load_study(study_name="s", storage=url)._storage.set_trial_system_attr(begun._trial_id, "note", "seen")
    assert isinstance(mine.storage, WholeRDB)
    noted = mine.storage.get_all_trials(mine.study._study_id)[begun.number]
    assert noted.system_attrs["note"] == "seen", "who reads without a cache reads what is there"
    for trial in (running[0], running[1], begun):
        other.end(trial, End(state=TrialState.FAIL, attributes={"why": "over"}))
    ours, there = both()
    assert ours == there and not any(one.state is TrialState.RUNNING for one in there)


def test_a_parameter_that_contradicts_the_study_is_refused(filed: Trials) -> None:
    written(filed)
    other = Entry(params={"engine": "hf"}, distributions={"engine": CategoricalDistribution(["hf"])}, attributes={})
    with pytest.raises(ValueError, match="does not support dynamic value space"):
        filed.enter(filed.begin({}), other)
    written(filed)


def test_a_probe_costs_its_driver_few_transactions(tmp_path: Path) -> None:
    machine, trainer = Machine(limit_bytes=2500 * MIB), ToyTrainer()
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes)
    study = open_study(question, legal_candidates(question, trainer), baseline_candidate(question, trainer))
    storage = study._written.storage
    assert isinstance(storage, WholeRDB)
    asked_of_it = Counter[str]()
    event.listen(storage.engine, "commit", lambda connection: asked_of_it.update(["commit"]))
    event.listen(storage.engine, "before_cursor_execute", lambda *given: asked_of_it.update(["statement"]))
    for _ in range(2):  # the first may have to look up what the second knows
        asked_of_it.clear()
        asked = study.ask(Means(seconds=1e9, probes=100))
        assert isinstance(asked, Asked)
        study.tell(asked, machine.measure(asked.candidate, SHORT))
    assert asked_of_it["commit"] <= 5, "a trial, what it is about, a claim, its end, and the claim given back"
    assert asked_of_it["statement"] <= 20
