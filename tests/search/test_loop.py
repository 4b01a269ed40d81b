"""The loop on machines whose optimum is known."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autotune.core.answer import Recommendation, Trial, without_result
from autotune.core.errors import BadInput, ProbeError, StudyMismatch
from autotune.core.events import Event, ProbeEnded
from autotune.core.job import Job
from autotune.core.measurement import Failure, Measurement, Outcome, ProbePlan
from autotune.core.prediction import Estimate
from autotune.core.space import Candidate
from autotune.report.answer_facts import caveats_of
from autotune.search.agenda import RemainingBudget
from autotune.search.loop import (
    EMULATED_DEADLINE_S,
    LONG_PROBE,
    SHORT_PROBE,
    Clock,
    baseline_candidate,
    legal_candidates,
    run_search,
)
from autotune.search.study import open_study
from autotune.search.trial_storage import CANDIDATE_ID, MAX_SCREENED_RECORDS, OUTCOME
from tests.inline_executor import InlineExecutor
from tests.search.test_claims import fill
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, stored_toy_job, toy_job, toy_space


def run(
    job: Job,
    machine: Machine,
    events: list[Event] | None = None,
) -> Recommendation:
    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    listener = (lambda event: None) if events is None else events.append
    executor = InlineExecutor(measure=machine.measure)
    return run_search(
        job,
        study=study,
        executor=executor,
        listener=listener,
        clock=Clock(job.budget_seconds),
    )


def legal_ids(job: Job) -> set[str]:
    return {candidate.id for candidate in legal_candidates(job, ToyTrainer())}


def candidates_of(trials: Iterable[Trial]) -> list[Candidate]:
    return [trial.candidate for trial in trials]


def best_by_enumeration(
    job: Job,
    machine: Machine,
    learning: dict[str, object],
) -> Candidate:
    fitting = []
    for candidate in legal_candidates(job, ToyTrainer()):
        if (
            machine.need(candidate) <= machine.limit_bytes
            and learning.items() <= candidate.knobs.items()
        ):
            fitting.append(candidate)
    return max(fitting, key=machine.speed)


@pytest.mark.parametrize(
    ("limit", "sampler"),
    [
        (450, "value"),
        (600, "value"),
        (900, "value"),
        (2500, "value"),
        (600, "tpe"),
        (900, "random"),
        pytest.param(600, "gp", marks=pytest.mark.slow),
    ],
)
def test_finds_the_fastest_of_the_preferred_tier(
    tmp_path: Path,
    limit: int,
    sampler: str,
) -> None:
    machine = Machine(limit_bytes=limit * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes, sampler=sampler)
    answer = run(job, machine)
    assert answer.winner is not None
    best = best_by_enumeration(job, machine, {"num_generations": 8, "max_completion_length": 64})
    assert machine.speed(answer.winner.candidate) == machine.speed(best)
    assert answer.relaxed == {}
    assert answer.certificate is not None
    assert answer.certificate.candidate == answer.winner.candidate


def test_no_candidate_is_measured_twice_and_implied_ones_not_at_all(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=450 * MIB)
    answer = run(toy_job(tmp_path, toy_space(), machine.limit_bytes), machine)
    short = machine.short_probes()
    assert len(short) == len(set(short))
    assert answer.counts.implied > 0
    assert answer.proven == "no better candidate possible"


def test_learning_knobs_are_relaxed_in_the_declared_order(tmp_path: Path) -> None:
    # 8 generations of 64 tokens need 244 MiB at the very least; 4 of 64 need 204.
    machine = Machine(limit_bytes=220 * MIB)
    answer = run(toy_job(tmp_path, toy_space(), machine.limit_bytes), machine)
    assert answer.winner is not None
    assert answer.learning == {"num_generations": 4, "max_completion_length": 64}
    assert answer.relaxed == {"num_generations": 4}
    assert answer.changes[0].effect == "learning"
    assert answer.baseline is not None
    assert not answer.baseline.verdict.fits


def test_nothing_fits_is_proven_with_few_probes(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=120 * MIB)
    answer = run(toy_job(tmp_path, toy_space(), machine.limit_bytes), machine)
    assert answer.winner is None
    assert answer.proven == "nothing fits"
    assert answer.counts.probed <= 2 * 2 * 3 + 1


def test_a_space_for_throughput_ignores_preference(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=600 * MIB)
    space = replace(toy_space(), objective="throughput")
    job = toy_job(tmp_path, space, machine.limit_bytes)
    answer = run(job, machine)
    assert answer.winner is not None
    assert machine.speed(answer.winner.candidate) == machine.speed(
        best_by_enumeration(job, machine, {})
    )


def test_a_winner_that_fails_its_confirmation_is_replaced_by_the_runner_up(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    best = best_by_enumeration(job, machine, {"num_generations": 8, "max_completion_length": 64})

    def fails_when_long(candidate: Candidate, plan: ProbePlan) -> Measurement:
        long = plan.timed_cycles > 3
        machine.outcomes = {best.id: Outcome.OOM_OPTIMIZER} if long else {}
        return machine.measure(candidate, plan)

    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    executor = InlineExecutor(measure=fails_when_long)
    answer = run_search(
        job,
        study=study,
        executor=executor,
        listener=lambda event: None,
        clock=Clock(600),
    )
    assert answer.winner is not None
    assert answer.winner.candidate != best
    assert candidates_of(answer.refuted) == [best]
    assert answer.certificate is not None
    assert answer.certificate.verdict.fits


def test_a_winner_that_was_only_lucky_in_its_probe_is_beaten_by_the_runner_up(
    tmp_path: Path,
) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    job = toy_job(tmp_path, toy_space(use_vllm=(False,), batch=(4, 20)), machine.limit_bytes)
    best = best_by_enumeration(job, machine, {"num_generations": 8, "max_completion_length": 64})

    def slow_when_long(candidate: Candidate, plan: ProbePlan) -> Measurement:
        measured = machine.measure(candidate, plan)
        if (
            measured.worst is None
            or candidate.id != best.id
            or plan.timed_cycles == SHORT_PROBE.timed_cycles
        ):
            return measured
        return replace(
            measured, worst=replace(measured.worst, cycle_seconds=(2.0,) * plan.timed_cycles)
        )

    study = open_study(
        job, legal_candidates(job, ToyTrainer()), baseline_candidate(job, ToyTrainer())
    )
    executor = InlineExecutor(measure=slow_when_long)
    answer = run_search(
        job,
        study=study,
        executor=executor,
        listener=lambda event: None,
        clock=Clock(600),
    )
    assert answer.winner is not None
    assert answer.winner.candidate != best
    assert answer.certificate is not None
    assert answer.certificate.candidate == answer.winner.candidate
    assert machine.speed(answer.winner.candidate) > machine.speed(best) / 1.5


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_drifts_does_not_choose_for_us(tmp_path: Path, seed: int) -> None:
    """Speeds wander by up to 15% over a few probes, and the best three are 5% apart, each from
    the next.
    """
    machine = Machine(limit_bytes=900 * MIB)
    space = toy_space(
        use_vllm=(False,),
        checkpointing=(True,),
        batch=(5, 6, 7, 8),
    )
    job = toy_job(tmp_path, space, machine.limit_bytes)
    best = best_by_enumeration(job, machine, {"num_generations": 8, "max_completion_length": 64})

    def drifting(candidate: Candidate, plan: ProbePlan) -> Measurement:
        measured = machine.measure(candidate, plan)
        if measured.worst is None:
            return measured
        pace = 1 + 0.15 * math.sin(seed + len(machine.asked) / 2.5)
        return replace(
            measured, worst=replace(measured.worst, cycle_seconds=(pace,) * plan.timed_cycles)
        )

    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    executor = InlineExecutor(measure=drifting)
    answer = run_search(
        job,
        study=study,
        executor=executor,
        listener=lambda event: None,
        clock=Clock(600),
    )
    assert answer.winner is not None
    assert machine.speed(answer.winner.candidate) >= 0.95 * machine.speed(best)
    assert answer.certificate is not None


def test_a_finalist_is_judged_by_all_its_rounds(tmp_path: Path) -> None:
    """The baseline and a candidate 4 % faster, with cycles that scatter by more."""
    machine = Machine(limit_bytes=2500 * MIB)
    space = toy_space(
        use_vllm=(False,),
        checkpointing=(True,),
        batch=(9, 8),
    )
    job = toy_job(tmp_path, space, machine.limit_bytes)

    def loading(candidate: Candidate, plan: ProbePlan) -> Measurement:
        measured = machine.measure(candidate, plan)
        assert measured.worst is not None
        cycles = (1.0, 0.9, 1.1, 0.95, 1.05)[: plan.timed_cycles]
        return replace(measured, worst=replace(measured.worst, cycle_seconds=cycles))

    study = open_study(
        job, legal_candidates(job, ToyTrainer()), baseline_candidate(job, ToyTrainer())
    )
    answer = run_search(
        job,
        study=study,
        executor=InlineExecutor(measure=loading),
        listener=lambda event: None,
        clock=Clock(600.0),
    )
    assert answer.certificate is not None
    assert answer.certificate.measurement.worst is not None
    turns = []
    for trial in answer.trials:
        if trial.purpose == "confirm" and trial.candidate == answer.certificate.candidate:
            turns.append(trial)
    assert len(turns) > 1
    cycles = answer.certificate.measurement.worst.cycle_seconds
    assert len(cycles) == len(turns) * LONG_PROBE.timed_cycles


def test_slow_candidates_get_a_stop_threshold_but_not_the_first(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    run(toy_job(tmp_path, toy_space(), machine.limit_bytes), machine)
    searching = []
    for _, plan in machine.asked:
        if plan.timed_cycles == 3:
            searching.append(plan.stop_below_tokens_per_second)
    assert searching[0] is None
    assert any(stop is not None and stop > 0 for stop in searching[2:])


def test_max_probes_is_kept(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    answer = run(toy_job(tmp_path, toy_space(), machine.limit_bytes, max_probes=5), machine)
    assert answer.counts.probed == 5
    assert answer.proven == "budget spent"
    assert answer.winner is not None
    assert answer.certificate is not None


def test_outcomes_are_recorded_in_the_states_of_optunas_samplers(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=450 * MIB)
    job = stored_toy_job(tmp_path, toy_space(), machine.limit_bytes)
    run(job, machine)
    recorded = optuna.load_study(study_name="toy", storage=job.storage).get_trials()
    assert {trial.state.name for trial in recorded} == {"COMPLETE", "PRUNED"}
    for trial in recorded:
        violation = max(trial.constraints.values())
        fits = trial.user_attrs["outcome"] == "ok"
        assert (violation <= 0) == fits == (trial.state.name == "COMPLETE")
        for name, value in trial.user_attrs["candidate"]["knobs"].items():
            assert trial.params[name] == value


def test_resume_goes_on_without_repeating(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    job = stored_toy_job(tmp_path, toy_space(), machine.limit_bytes)
    legal = legal_ids(job)

    def dies_at_the_sixth(candidate: Candidate, plan: ProbePlan) -> Measurement:
        if len(machine.asked) == 5:
            raise KeyboardInterrupt
        return machine.measure(candidate, plan)

    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    first = run_search(
        job,
        study=study,
        executor=InlineExecutor(measure=dies_at_the_sixth),
        listener=lambda event: None,
        clock=Clock(600),
    )
    assert first.interrupted
    assert first.winner is not None
    answer = run(replace(job, resume=True), machine)
    short = machine.short_probes()
    assert len(short) == len(set(short))
    assert set(short) <= legal
    assert not answer.interrupted
    assert answer.counts.probed == len(short)


def test_the_same_study_is_not_silently_mixed_or_overwritten(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    job = stored_toy_job(tmp_path, toy_space(), machine.limit_bytes, max_probes=3)
    run(job, machine)
    with pytest.raises(BadInput, match="--resume"):
        run(job, machine)
    with pytest.raises(StudyMismatch, match="choices"):
        run(
            stored_toy_job(tmp_path, toy_space(batch=(1, 2)), machine.limit_bytes, resume=True),
            machine,
        )
    probes = len(machine.asked)
    run(replace(job, fresh=True), machine)
    assert len(machine.asked) > probes


def test_machine_faults_are_retried_once_and_do_not_count_for_the_candidate(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    faults = iter([False, True, False])

    def stumbles(candidate: Candidate, plan: ProbePlan) -> Measurement:
        if next(faults, False):
            raise ProbeError("The port was taken.")
        return machine.measure(candidate, plan)

    events: list[Event] = []
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    executor = InlineExecutor(measure=stumbles)
    answer = run_search(
        job,
        study=study,
        executor=executor,
        listener=events.append,
        clock=Clock(600),
    )
    assert answer.baseline is not None
    assert answer.baseline.verdict.fits
    assert sum(isinstance(event, ProbeEnded) for event in events) == len(answer.trials)


def test_a_full_disk_ends_the_search_with_what_was_measured(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    job = toy_job(
        tmp_path, toy_space(), machine.limit_bytes, storage=f"sqlite:///{tmp_path}/study.db"
    )
    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))

    def fills_the_disk(event: Event) -> None:
        if isinstance(event, ProbeEnded) and len(study.trials) == 3:
            fill(study._study._storage._backend)

    executor = InlineExecutor(measure=machine.measure)
    answer = run_search(
        job,
        study=study,
        executor=executor,
        listener=fills_the_disk,
        clock=Clock(600),
    )
    assert answer.fault is not None
    assert "disk is full" in answer.fault
    assert answer.interrupted
    assert answer.proven == "stopped by a fault"
    # Pages that the database already has are still filled.
    assert answer.winner is not None
    assert len(answer.trials) >= 3

    resumed = replace(job, resume=True)
    again = open_study(resumed, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    # A measurement can be complete on the disk whose trial could not be ended any more.
    on_record = candidates_of(again.trials)
    assert on_record[: len(answer.trials)] == candidates_of(answer.trials)
    assert len(on_record) <= len(answer.trials) + 1


def test_a_probe_ended_from_outside_is_measured_again_at_most_twice(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    job = toy_job(tmp_path, toy_space(use_vllm=(False,), batch=(4, 20)), machine.limit_bytes)
    unlucky = best_by_enumeration(job, machine, {"num_generations": 8, "max_completion_length": 64})
    hopeless = next(
        candidate for candidate in legal_candidates(job, ToyTrainer()) if candidate != unlucky
    )
    attempts: Counter[str] = Counter()

    def killed_now_and_then(candidate: Candidate, plan: ProbePlan) -> Measurement:
        attempts[candidate.id] += 1
        measured = machine.measure(candidate, plan)
        if candidate == hopeless or (candidate == unlucky and attempts[candidate.id] <= 2):
            killed = Failure(
                evidence="the process was ended by SIGKILL, sent from outside the probe",
                from_outside=True,
            )
            return replace(
                measured,
                outcome=Outcome.INTERRUPTED,
                failure=killed,
                worst=None,
                typical=None,
            )
        return measured

    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), hopeless)
    executor = InlineExecutor(measure=killed_now_and_then)
    answer = run_search(
        job,
        study=study,
        executor=executor,
        listener=lambda event: None,
        clock=Clock(600),
    )
    assert answer.proven == "not all measured"
    assert candidates_of(without_result(answer.trials)) == [hopeless]
    assert "ended from outside, so there is no result: " in "\n".join(caveats_of(answer))
    assert attempts[hopeless.id] == 3, "it was not given up, or too early"
    assert answer.winner is not None and answer.winner.candidate == unlucky, (
        "it was not measured again"
    )
    assert answer.baseline is not None
    assert answer.baseline.measurement.outcome is Outcome.INTERRUPTED


def test_a_study_whose_driver_was_killed_has_no_running_trial_after_resume(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    job = stored_toy_job(tmp_path, toy_space(), machine.limit_bytes, max_probes=4)
    run(job, machine)
    optuna.load_study(study_name="toy", storage=job.storage).ask()
    run(replace(job, resume=True, max_probes=6), machine)
    states = set()
    for trial in optuna.load_study(study_name="toy", storage=job.storage).get_trials():
        states.add(trial.state.name)
    assert "RUNNING" not in states


def test_a_failure_that_every_candidate_shares_ends_the_search_early(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=2500 * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    machine.outcomes = dict.fromkeys(legal_ids(job), Outcome.CRASH)
    answer = run(job, machine)
    assert answer.winner is None
    assert answer.proven == "not proven infeasible"
    assert answer.counts.probed == 3


def test_screened_candidates_are_on_record_and_never_measured(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=450 * MIB)
    job = stored_toy_job(tmp_path, toy_space(), machine.limit_bytes)
    trainer = ToyTrainer()
    oracle = Oracle(machine=machine, off=0.05)
    candidates = legal_candidates(job, trainer)
    ruled_out = {}
    for name, prediction in oracle.screen(candidates).items():
        if prediction.fits is False:
            ruled_out[name] = prediction
    assert ruled_out
    for _ in range(2):  # a second opening of the same study records nothing twice
        study = open_study(
            replace(job, resume=True), candidates, baseline_candidate(job, trainer), ruled_out
        )
    executor = InlineExecutor(measure=machine.measure)
    answer = run_search(
        job,
        study=study,
        executor=executor,
        listener=lambda event: None,
        clock=Clock(600.0),
    )
    assert answer.winner is not None
    assert answer.counts.screened == len(ruled_out)
    assert not {candidate.id for candidate, _ in machine.asked} & set(ruled_out)
    recorded_study = optuna.load_study(study_name="toy", storage=job.storage)
    on_record = []
    for trial in recorded_study.trials:
        if trial.user_attrs.get("outcome") == "screened":
            on_record.append(trial)
    assert (
        0 < len(on_record) < len(ruled_out)
    )  # the nearest to the limit: the rest is counted, not written down
    for trial in on_record:
        assert trial.state is optuna.trial.TrialState.PRUNED
        assert "predicted" in trial.user_attrs["why"]
    (tmp_path / "plain").mkdir()
    plain = run(
        stored_toy_job(tmp_path / "plain", toy_space(), machine.limit_bytes),
        Machine(limit_bytes=450 * MIB),
    )
    assert plain.winner is not None
    assert machine.speed(plain.winner.candidate) == machine.speed(answer.winner.candidate)
    assert answer.counts.out_of_memory < plain.counts.out_of_memory


@pytest.mark.parametrize(
    ("emulated", "seconds"), [(True, EMULATED_DEADLINE_S), (False, SHORT_PROBE.deadline_seconds)]
)
def test_a_probe_on_emulated_cards_has_the_time_that_a_few_cores_need(
    emulated: bool,
    seconds: float,
    tmp_path: Path,
) -> None:
    machine = Machine(limit_bytes=900 * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes, budget_seconds=36_000.0, max_probes=2)
    hardware = replace(job.task.hardware, kind="cuda", emulated=emulated)
    run(replace(job, task=replace(job.task, hardware=hardware)), machine)
    assert machine.asked[0][1].deadline_seconds == seconds


def test_equally_screened_candidates_are_recorded_in_the_order_of_the_table(
    tmp_path: Path,
) -> None:
    """The order of a set differs between processes, and Optuna's samplers learn from the record."""
    machine = Machine(limit_bytes=900 * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes, sampler="tpe")
    candidates = legal_candidates(job, ToyTrainer())
    beyond = Estimate(
        value=3000.0 * MIB,
        low=2900.0 * MIB,
        high=3100.0 * MIB,
    )
    predictions = {}
    for name, prediction in Oracle(machine=machine).screen(candidates).items():
        predictions[name] = replace(prediction, peak_memory_bytes=beyond, fits=False)
    study = open_study(job, candidates, None, predictions)
    study.ask(RemainingBudget(seconds=600.0, probes=100))
    recorded = []
    for trial in study._study.get_trials(deepcopy=False):
        if trial.user_attrs.get(OUTCOME) == "screened":
            recorded.append(trial.user_attrs[CANDIDATE_ID])
    assert recorded == [candidate.id for candidate in candidates[:MAX_SCREENED_RECORDS]]
