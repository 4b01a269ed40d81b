"""Two drivers of one study, step by step: what one of them does between two steps of the other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autotune.search.agenda import RemainingBudget
from autotune.search.loop import SHORT_PROBE, baseline_candidate, legal_candidates
from autotune.search.study import Study, TrialRequest, open_study
from tests.simulated import MIB, Machine, ToyTrainer, toy_job, toy_space

MEANS = RemainingBudget(seconds=1e9, probes=100)


class Drivers:
    """Two drivers of one study in a file."""

    def __init__(self, folder: Path) -> None:
        self.machine = Machine(limit_bytes=900 * MIB)
        self.url = f"sqlite:///{folder}/study.db"
        self._question = replace(
            toy_job(folder, toy_space(), self.machine.limit_bytes), storage=self.url
        )

    def another(self) -> Study:
        job = replace(self._question, resume=self._there())
        trainer = ToyTrainer()
        return open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))

    def measure(self, study: Study) -> TrialRequest:
        request = study.ask(MEANS)
        assert isinstance(request, TrialRequest)
        study.tell(request, self.machine.measure(request.candidate, SHORT_PROBE))
        return request

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        return optuna.load_study(
            study_name=self._question.study_name, storage=self.url
        ).get_trials()

    def _there(self) -> bool:
        return (
            bool(optuna.get_all_study_names(self.url))
            if Path(self.url.removeprefix("sqlite:///")).exists()
            else False
        )


@pytest.fixture
def drivers(tmp_path: Path) -> Drivers:
    return Drivers(tmp_path)


def test_a_begun_trial_without_a_claim_is_not_swept_by_a_joining_driver(drivers: Drivers) -> None:
    study = drivers.another()
    take, joined = study._claims.take, list[Study]()

    def take_late(candidate_id: str) -> bool:
        if not joined:
            joined.append(drivers.another())
        return take(candidate_id)

    study._claims.take = take_late  # type: ignore[method-assign]
    request = drivers.measure(study)
    assert joined
    assert request.number == study.trials[-1].number
    assert Counter(trial.state for trial in drivers.trials())[TrialState.FAIL] == 0
    assert drivers.measure(joined[0]).candidate != request.candidate


def test_a_measurement_counts_after_its_driver_was_swept(drivers: Drivers) -> None:
    study = drivers.another()
    request = study.ask(MEANS)
    assert isinstance(request, TrialRequest)
    optuna.load_study(study_name=study._study.study_name, storage=drivers.url).tell(
        request.number, state=TrialState.FAIL
    )
    trial = study.tell(request, drivers.machine.measure(request.candidate, SHORT_PROBE))
    assert trial.number != request.number
    assert trial.candidate == request.candidate
    again = drivers.another()
    assert [trial.candidate.id for trial in again.trials] == [request.candidate.id]
    assert again.trials[0].measurement.outcome == trial.measurement.outcome
    assert drivers.measure(study).candidate != request.candidate


def test_a_fault_of_a_swept_driver_ends_no_other(drivers: Drivers) -> None:
    study = drivers.another()
    request = study.ask(MEANS)
    assert isinstance(request, TrialRequest)
    optuna.load_study(study_name=study._study.study_name, storage=drivers.url).tell(
        request.number, state=TrialState.FAIL
    )
    study.tell_fault(request, "the machine failed")
    assert not study.trials
    assert drivers.measure(study).candidate == request.candidate
