"""The loop on machines whose optimum is known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autotune.candidate import Candidate
from autotune.errors import BadInput, RigError, StudyMismatch
from autotune.events import Event, ProbeEnded
from autotune.executors.inline import InlineExecutor
from autotune.measurement import Measurement, Outcome
from autotune.question import Question
from autotune.recommendation import Recommendation
from autotune.study import open_study
from autotune.trainers.base import ProbePlan
from autotune.tune import LONG, SHORT, Clock, baseline_candidate, legal_candidates, tune
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_question, toy_space


def run(question: Question, machine: Machine, events: list[Event] | None = None) -> Recommendation:
    trainer = ToyTrainer()
    study = open_study(question, legal_candidates(question, trainer), baseline_candidate(question, trainer))
    listener = (lambda event: None) if events is None else events.append
    executor = InlineExecutor(measure=machine.measure)
    return tune(question, study=study, executor=executor, listener=listener, clock=Clock(question.budget_seconds))


def best_by_enumeration(question: Question, machine: Machine, learning: dict[str, object]) -> Candidate:
    fitting = [
        candidate
        for candidate in legal_candidates(question, ToyTrainer())
        if machine.need(candidate) <= machine.limit_bytes and learning.items() <= candidate.knobs.items()
    ]
    return max(fitting, key=machine.speed)


@pytest.mark.parametrize("sampler", ["value", "tpe", "random", pytest.param("gp", marks=pytest.mark.slow)])
@pytest.mark.parametrize("limit", [450, 600, 900, 2500])
def test_finds_the_fastest_of_the_preferred_tier(tmp_path: Path, limit: int, sampler: str) -> None:
    machine = Machine(limit_bytes=limit * MIB)
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes, sampler=sampler)
    answer = run(question, machine)
    assert answer.winner is not None
    best = best_by_enumeration(question, machine, {"num_generations": 8, "max_completion_length": 64})
    assert machine.speed(answer.winner.candidate) == machine.speed(best)
    assert answer.relaxed == {}
    assert answer.certificate is not None and answer.certificate.candidate == answer.winner.candidate


def test_nothing_is_measured_twice_and_what_an_oom_settles_is_not_measured_at_all(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=450 * MIB)
    answer = run(toy_question(tmp_path, toy_space(), machine.limit_bytes), machine)
    short = [candidate.id for candidate, plan in machine.asked if plan.timed_cycles == 3]
    assert len(short) == len(set(short))
    assert answer.counts.implied > 0
    assert answer.proven == "no better candidate possible"


def test_learning_knobs_give_way_in_the_declared_order(tmp_path: Path) -> None:
    # 8 generations of 64 tokens need 244 MiB at the very least; 4 of 64 need 204.
    machine = Machine(limit_bytes=220 * MIB)
    answer = run(toy_question(tmp_path, toy_space(), machine.limit_bytes), machine)
    assert answer.winner is not None
    assert answer.learning == {"num_generations": 4, "max_completion_length": 64}
    assert answer.relaxed == {"num_generations": 4}
    assert answer.changes[0].effect == "learning"
    assert answer.baseline is not None and not answer.baseline.verdict.fits


def test_nothing_fits_is_proven_with_few_probes(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=120 * MIB)
    answer = run(toy_question(tmp_path, toy_space(), machine.limit_bytes), machine)
    assert answer.winner is None
    assert answer.proven == "no better candidate possible"
    assert answer.counts.probed <= 2 * 2 * 3 + 1


def test_a_space_for_throughput_ignores_preference(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=600 * MIB)
    space = replace(toy_space(), objective="throughput")
    question = toy_question(tmp_path, space, machine.limit_bytes)
    answer = run(question, machine)
    assert answer.winner is not None
    assert machine.speed(answer.winner.candidate) == machine.speed(best_by_enumeration(question, machine, {}))


def test_a_winner_that_fails_its_confirmation_is_replaced_by_the_runner_up(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes)
    best = best_by_enumeration(question, machine, {"num_generations": 8, "max_completion_length": 64})

    def fails_when_long(candidate: Candidate, plan: ProbePlan) -> Measurement:
        long = plan.timed_cycles > 3
        machine.outcomes = {best.id: Outcome.OOM_OPTIMIZER} if long else {}
        return machine.measure(candidate, plan)

    trainer = ToyTrainer()
    study = open_study(question, legal_candidates(question, trainer), baseline_candidate(question, trainer))
    executor = InlineExecutor(measure=fails_when_long)
    answer = tune(question, study=study, executor=executor, listener=lambda event: None, clock=Clock(600))
    assert answer.winner is not None and answer.winner.candidate != best
    assert [trial.candidate for trial in answer.refuted] == [best]
    assert answer.certificate is not None and answer.certificate.verdict.fits


def test_a_winner_that_was_only_lucky_in_its_probe_is_beaten_by_the_runner_up(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    question = toy_question(tmp_path, toy_space(use_vllm=(False,), batch=(4, 20)), machine.limit_bytes)
    best = best_by_enumeration(question, machine, {"num_generations": 8, "max_completion_length": 64})

    def slow_when_long(candidate: Candidate, plan: ProbePlan) -> Measurement:
        measured = machine.measure(candidate, plan)
        if measured.worst is None or candidate.id != best.id or plan.timed_cycles == SHORT.timed_cycles:
            return measured
        return replace(measured, worst=replace(measured.worst, cycle_seconds=(1.5,) * plan.timed_cycles))

    study = open_study(question, legal_candidates(question, ToyTrainer()), baseline_candidate(question, ToyTrainer()))
    executor = InlineExecutor(measure=slow_when_long)
    answer = tune(question, study=study, executor=executor, listener=lambda event: None, clock=Clock(600))
    assert answer.winner is not None and answer.winner.candidate != best
    assert answer.certificate is not None and answer.certificate.candidate == answer.winner.candidate
    assert machine.speed(answer.winner.candidate) > machine.speed(best) / 1.5


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_drifts_does_not_choose_for_us(tmp_path: Path, seed: int) -> None:
    """Speeds wander by up to 15% over a few probes, and the best three are 5% apart, each from the next."""
    machine = Machine(limit_bytes=900 * MIB)
    space = toy_space(use_vllm=(False,), checkpointing=(True,), batch=(5, 6, 7, 8))
    question = toy_question(tmp_path, space, machine.limit_bytes)
    best = best_by_enumeration(question, machine, {"num_generations": 8, "max_completion_length": 64})

    def drifting(candidate: Candidate, plan: ProbePlan) -> Measurement:
        measured = machine.measure(candidate, plan)
        if measured.worst is None:
            return measured
        pace = 1 + 0.15 * math.sin(seed + len(machine.asked) / 2.5)
        return replace(measured, worst=replace(measured.worst, cycle_seconds=(pace,) * plan.timed_cycles))

    trainer = ToyTrainer()
    study = open_study(question, legal_candidates(question, trainer), baseline_candidate(question, trainer))
    executor = InlineExecutor(measure=drifting)
    answer = tune(question, study=study, executor=executor, listener=lambda event: None, clock=Clock(600))
    assert answer.winner is not None
    assert machine.speed(answer.winner.candidate) >= 0.95 * machine.speed(best)
    assert answer.certificate is not None


def test_what_a_finalist_is_judged_by_is_all_its_turns(tmp_path: Path) -> None:
    """Two that are 1% apart, where the search took long enough that telling them apart is affordable."""
    machine = Machine(limit_bytes=2500 * MIB)
    space = toy_space(use_vllm=(False,), checkpointing=(True,), batch=(19, 20))
    question = toy_question(tmp_path, space, machine.limit_bytes)

    def loading(candidate: Candidate, plan: ProbePlan) -> Measurement:
        measured = machine.measure(candidate, plan)
        seconds = 10.0 if plan.timed_cycles == SHORT.timed_cycles else 1.0
        return replace(measured, cost=replace(measured.cost, total_seconds=seconds))

    study = open_study(question, legal_candidates(question, ToyTrainer()), baseline_candidate(question, ToyTrainer()))
    answer = tune(
        question, study=study, executor=InlineExecutor(measure=loading), listener=lambda event: None, clock=Clock(600.0)
    )
    assert answer.certificate is not None and answer.certificate.measurement.worst is not None
    turns = [trial for trial in answer.trials if trial.purpose == "confirm" and trial.candidate == answer.certificate.candidate]
    assert len(turns) == 2
    assert len(answer.certificate.measurement.worst.cycle_seconds) == 2 * LONG.timed_cycles


def test_slow_candidates_are_told_where_to_stop_but_not_the_first(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    run(toy_question(tmp_path, toy_space(), machine.limit_bytes), machine)
    searching = [plan.stop_below_tokens_per_second for _, plan in machine.asked if plan.timed_cycles == 3]
    assert searching[0] is None
    assert any(stop is not None and stop > 0 for stop in searching[2:])


def test_max_probes_is_kept(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    answer = run(toy_question(tmp_path, toy_space(), machine.limit_bytes, max_probes=5), machine)
    assert answer.counts.probed == 5
    assert answer.proven == "budget spent"
    assert answer.winner is not None and answer.certificate is not None


def test_outcomes_are_told_to_optuna_as_its_samplers_want_them(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=450 * MIB)
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes)
    run(question, machine)
    recorded = optuna.load_study(study_name="toy", storage=question.storage).get_trials()
    assert {trial.state.name for trial in recorded} == {"COMPLETE", "PRUNED"}
    for trial in recorded:
        (violation,) = trial.constraints.values()
        fits = trial.user_attrs["outcome"] == "ok"
        assert (violation <= 0) == fits == (trial.state.name == "COMPLETE")
        assert all(trial.params[name] == value for name, value in trial.user_attrs["candidate"]["knobs"].items())


def test_resume_goes_on_without_repeating(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes)
    whole = {candidate.id for candidate in legal_candidates(question, ToyTrainer())}

    def dies_at_the_sixth(candidate: Candidate, plan: ProbePlan) -> Measurement:
        if len(machine.asked) == 5:
            raise KeyboardInterrupt
        return machine.measure(candidate, plan)

    trainer = ToyTrainer()
    study = open_study(question, legal_candidates(question, trainer), baseline_candidate(question, trainer))
    first = tune(
        question,
        study=study,
        executor=InlineExecutor(measure=dies_at_the_sixth),
        listener=lambda event: None,
        clock=Clock(600),
    )
    assert first.interrupted and first.winner is not None
    answer = run(replace(question, resume=True), machine)
    short = [candidate.id for candidate, plan in machine.asked if plan.timed_cycles == 3]
    assert len(short) == len(set(short)) and set(short) <= whole
    assert not answer.interrupted and answer.counts.probed == len(short)


def test_the_same_study_is_not_silently_mixed_or_overwritten(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes, max_probes=3)
    run(question, machine)
    with pytest.raises(BadInput, match="--resume"):
        run(question, machine)
    with pytest.raises(StudyMismatch, match="choices"):
        run(toy_question(tmp_path, toy_space(batch=(1, 2)), machine.limit_bytes, resume=True), machine)
    asked = len(machine.asked)
    run(replace(question, fresh=True), machine)
    assert len(machine.asked) > asked


def test_faults_of_the_machine_are_retried_once_and_never_held_against_the_candidate(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    faults = iter([False, True, False])

    def stumbles(candidate: Candidate, plan: ProbePlan) -> Measurement:
        if next(faults, False):
            raise RigError("The port was taken.")
        return machine.measure(candidate, plan)

    events: list[Event] = []
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes)
    trainer = ToyTrainer()
    study = open_study(question, legal_candidates(question, trainer), baseline_candidate(question, trainer))
    executor = InlineExecutor(measure=stumbles)
    answer = tune(question, study=study, executor=executor, listener=events.append, clock=Clock(600))
    assert answer.baseline is not None and answer.baseline.verdict.fits
    assert sum(isinstance(event, ProbeEnded) for event in events) == len(answer.trials)


def test_a_study_whose_driver_was_killed_has_no_running_trial_after_resume(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes, max_probes=4)
    run(question, machine)
    optuna.load_study(study_name="toy", storage=question.storage).ask()
    run(replace(question, resume=True, max_probes=6), machine)
    states = {trial.state.name for trial in optuna.load_study(study_name="toy", storage=question.storage).get_trials()}
    assert "RUNNING" not in states


def test_a_failure_that_every_candidate_shares_ends_the_search_early(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes)
    machine.outcomes = {candidate.id: Outcome.CRASH for candidate in legal_candidates(question, ToyTrainer())}
    answer = run(question, machine)
    assert answer.winner is None and answer.proven == "not proven infeasible"
    assert answer.counts.probed == 3


def test_what_cannot_fit_is_on_record_and_never_measured(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=450 * MIB)
    question = toy_question(tmp_path, toy_space(), machine.limit_bytes)
    trainer, oracle = ToyTrainer(), Oracle(machine=machine, off=0.05)
    candidates = legal_candidates(question, trainer)
    ruled_out = {name: one for name, one in oracle.screen(candidates).items() if one.fits is False}
    assert ruled_out
    for _ in range(2):  # a second opening of the same study records nothing twice
        study = open_study(replace(question, resume=True), candidates, baseline_candidate(question, trainer), ruled_out)
    executor = InlineExecutor(measure=machine.measure)
    answer = tune(question, study=study, executor=executor, listener=lambda event: None, clock=Clock(600.0))
    assert answer.winner is not None
    assert answer.counts.screened == len(ruled_out)
    assert not {candidate.id for candidate, _ in machine.asked} & set(ruled_out)
    kept = optuna.load_study(study_name="toy", storage=question.storage)
    on_record = [trial for trial in kept.trials if trial.user_attrs.get("outcome") == "screened"]
    assert 0 < len(on_record) < len(ruled_out)  # the nearest to the limit: the rest is counted, not written down
    assert all(trial.state is optuna.trial.TrialState.PRUNED and "predicted" in trial.user_attrs["why"] for trial in on_record)
    (tmp_path / "plain").mkdir()
    plain = run(toy_question(tmp_path / "plain", toy_space(), machine.limit_bytes), Machine(limit_bytes=450 * MIB))
    assert plain.winner is not None and machine.speed(plain.winner.candidate) == machine.speed(answer.winner.candidate)
    assert answer.counts.out_of_memory < plain.counts.out_of_memory
