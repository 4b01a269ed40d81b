"""Trials as Optuna's records: complete after a kill at any place, and those of a user's own
objective.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autotune.core.errors import StudyMismatch
from autotune.core.measurement import Outcome
from autotune.search.agenda import RemainingBudget
from autotune.search.loop import SHORT_PROBE, baseline_candidate, legal_candidates
from autotune.search.parameters import ABSENT_VALUE, Parameters
from autotune.search.study import Study, TrialRequest, open_study
from autotune.search.trial_storage import MEMORY, VALIDITY, WHY, measured_end, rebuilt_trial
from tests.simulated import MIB, Machine, ToyTrainer, stored_toy_job, toy_space

BUDGET = RemainingBudget(seconds=1e9, probes=100)


class Killed(BaseException):
    """Ends a driver where it stands."""


def opened(folder: Path, **changes: Any) -> Study:
    job = stored_toy_job(folder, toy_space(), 900 * MIB, **changes)
    trainer = ToyTrainer()
    return open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))


def asked(study: Study) -> TrialRequest:
    request = study.ask(BUDGET)
    assert isinstance(request, TrialRequest)
    return request


def recorded(folder: Path) -> list[optuna.trial.FrozenTrial]:
    study = optuna.load_study(study_name="toy", storage=f"sqlite:///{folder}/study.db")
    return study.get_trials()


@pytest.mark.parametrize(
    ("method", "call", "is_kept"),
    [
        ("set_trial_user_attr", 1, False),  # the measurement itself
        ("set_trial_user_attr", 2, True),
        ("set_trial_intermediate_value", 1, True),
        ("set_trial_system_attr", 2, True),
        ("set_trial_state_values", 1, True),
    ],
)
def test_a_driver_that_is_killed_while_it_writes_loses_no_measurement(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    call: int,
    is_kept: bool,
) -> None:
    machine = Machine(limit_bytes=900 * MIB)
    study = opened(tmp_path)
    request = asked(study)
    measurement = machine.measure(request.candidate, SHORT_PROBE)
    storage = study._study._storage._backend  # type: ignore[attr-defined]
    inner = getattr(storage, method)
    calls = []

    def killing(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) == call:
            raise Killed
        return inner(*arguments, **options)

    monkeypatch.setattr(storage, method, killing)
    with pytest.raises(Killed):
        study.tell(request, measurement)
    # The next driver sees at once that this one has ended.
    study._claims.leave()  # type: ignore[union-attr]
    again = opened(tmp_path, resume=True)
    trials = [trial.candidate for trial in again.trials]
    assert trials == ([request.candidate] if is_kept else [])
    (trial,) = recorded(tmp_path)
    assert trial.state is (TrialState.COMPLETE if is_kept else TrialState.FAIL)
    if is_kept:
        assert trial.value == pytest.approx(machine.speed(request.candidate), abs=0.5)
        assert set(trial.constraints) == {MEMORY, VALIDITY}
    else:
        assert asked(again).candidate == request.candidate


def test_the_records_are_in_the_terms_of_optuna(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=900 * MIB)
    study = opened(tmp_path)
    for _ in range(4):
        request = asked(study)
        study.tell(request, machine.measure(request.candidate, SHORT_PROBE))
    for trial in recorded(tmp_path):
        knobs = trial.user_attrs["candidate"]["knobs"]
        assert set(trial.params) == {knob.name for knob in toy_space().knobs}
        assert trial.params["share"] == knobs.get("share", ABSENT_VALUE)
        need = trial.constraints[MEMORY]
        assert trial.constraints[VALIDITY] == 0
        if trial.state is TrialState.COMPLETE:
            speed = machine.speed(legal(knobs))
            assert trial.value == pytest.approx(speed, abs=0.5)
            assert list(trial.intermediate_values.values()) == [trial.value] * 3
            assert need <= 0
        else:
            assert need > 0
            assert not trial.intermediate_values


def legal(knobs: dict[str, Any]) -> Any:
    return ToyTrainer().complete(knobs, None)  # type: ignore[arg-type]


def test_a_study_with_other_values_of_a_parameter_is_refused_with_a_way_out(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=900 * MIB)
    job = stored_toy_job(tmp_path, toy_space(), machine.limit_bytes)
    study = opened(tmp_path)
    request = asked(study)
    study.tell(request, machine.measure(request.candidate, SHORT_PROBE))
    knobs = {**request.candidate.knobs, "batch": 1024}
    candidate = ToyTrainer().complete(knobs, job.task)
    with pytest.raises(StudyMismatch, match="batch"):
        open_study(replace(job, resume=True), legal_candidates(job, ToyTrainer()), candidate)


def test_a_trial_of_a_users_own_objective_is_read_by_value_and_constraints(tmp_path: Path) -> None:
    trainer = ToyTrainer()
    job = stored_toy_job(tmp_path, toy_space(), 1000 * MIB)
    candidates = legal_candidates(job, trainer)
    parameters = Parameters(job.space, candidates)
    study = optuna.create_study(direction="maximize")

    def trial_with(state: TrialState, **parts: Any) -> Any:
        frozen = optuna.trial.create_trial(
            state=state,
            params=parameters.of(candidates[3]),
            distributions=parameters.distributions,
            **parts,
        )
        study.add_trial(frozen)
        candidate = parameters.candidate_of(study.trials[-1].params)
        assert candidate == candidates[3]
        return rebuilt_trial(study.trials[-1], candidate, job.memory_limit_bytes)

    fits = trial_with(TrialState.COMPLETE, value=250.0, constraints={MEMORY: -0.25})
    assert fits.verdict.fits
    assert fits.measurement.memory.peak_bytes == 750 * MIB
    assert fits.measurement.ranking_speed.tokens_per_second == pytest.approx(250.0)
    slow = trial_with(TrialState.PRUNED, intermediate_values={0: 0.5, 1: 0.7})
    assert slow.verdict.fits
    assert slow.measurement.worst.cut_short
    assert slow.measurement.worst.rates == pytest.approx([0.5, 0.7])
    # It fits: its peak alone would not say why it was pruned.
    assert "too slow" in measured_end(slow).attributes[WHY]
    assert "too slow" not in measured_end(fits).attributes[WHY]
    beyond = trial_with(TrialState.PRUNED, constraints={MEMORY: 0.5})
    assert beyond.measurement.outcome.is_out_of_memory
    assert beyond.measurement.memory.peak_bytes == 1500 * MIB
    broken = trial_with(TrialState.PRUNED, constraints={MEMORY: 0.0, VALIDITY: 1.0})
    assert broken.measurement.outcome is Outcome.CRASH
    assert trial_with(TrialState.FAIL) is None
