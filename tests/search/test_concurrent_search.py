"""Several probes at a time: the same answers, nothing twice, finalists alone, faults and
interruptions without a loss.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import optuna
import pytest

from autotune.core.answer import Recommendation
from autotune.core.errors import ProbeError, SlotLost
from autotune.core.events import Event, ProbeEnded, ProbeStarted
from autotune.core.job import Job
from autotune.core.measurement import Measurement, Outcome, ProbePlan, Speed
from autotune.core.space import Candidate
from autotune.probe.executors.base import Executor
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, ToyTrainer, note_text, stored_toy_job, toy_job, toy_space

SECONDS = 0.2
"""Longer than asking takes, so that probes meet."""


class Crowd:
    """Machine with short probes that counts concurrent ones."""

    def __init__(
        self,
        machine: Machine,
        *,
        slowdown: float = 0.0,
    ) -> None:
        self.machine, self.slowdown = machine, slowdown
        self.most, self.beside_a_finalist = 0, 0
        self._met: dict[int, int] = {}
        """Maximum number of concurrent probes met by each running one, by thread."""

        self.short: Counter[str] = Counter()
        self._lock = threading.Lock()

    def measure(
        self,
        candidate: Candidate,
        plan: ProbePlan,
    ) -> Measurement:
        me = threading.get_ident()
        with self._lock:
            self._met = {probe: max(met, len(self._met)) for probe, met in self._met.items()} | {
                me: len(self._met)
            }
            self.most = max(self.most, len(self._met))
        time.sleep(SECONDS)
        with self._lock:
            neighbours = self._met.pop(me)
            if plan.timed_cycles > 3:
                self.beside_a_finalist = max(self.beside_a_finalist, neighbours)
            elif plan.reuse_rollouts:
                self.short[candidate.id] += 1
            measurement = self.machine.measure(candidate, plan)
        return measurement if not neighbours else _slower(measurement, self.slowdown)


def _slower(measurement: Measurement, share: float) -> Measurement:
    if measurement.worst is None:
        return measurement
    speed: Speed = replace(
        measurement.worst,
        cycle_seconds=tuple(seconds / (1 - share) for seconds in measurement.worst.cycle_seconds),
    )
    return replace(measurement, worst=speed)


def run(
    job: Job,
    executor: Executor,
    events: list[Event] | None = None,
) -> Recommendation:
    trainer = ToyTrainer()
    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    listener = (lambda event: None) if events is None else events.append
    return run_search(
        job,
        study=study,
        executor=executor,
        listener=listener,
        clock=Clock(job.budget_seconds),
    )


@pytest.mark.parametrize("slots", [1, 8])
def test_the_answer_does_not_depend_on_the_number_of_slots(tmp_path: Path, slots: int) -> None:
    crowd = Crowd(Machine(limit_bytes=900 * MIB))
    job = stored_toy_job(tmp_path, toy_space(), crowd.machine.limit_bytes)
    answer = run(job, InlineExecutor(crowd.measure, slots=slots))
    assert answer.winner is not None
    assert answer.certificate is not None
    preferred = {"num_generations": 8, "max_completion_length": 64}
    fitting = []
    for candidate in legal_candidates(job, ToyTrainer()):
        if (
            crowd.machine.need(candidate) <= crowd.machine.limit_bytes
            and preferred.items() <= candidate.knobs.items()
        ):
            fitting.append(candidate)
    assert crowd.machine.speed(answer.winner.candidate) == max(map(crowd.machine.speed, fitting))
    assert crowd.most == min(slots, crowd.most)
    assert (slots == 1) == (crowd.most == 1)
    assert max(crowd.short.values()) == 1
    assert crowd.beside_a_finalist == 0
    states = Counter(
        trial.state.name
        for trial in optuna.load_study(study_name="toy", storage=job.storage).get_trials()
    )
    assert set(states) <= {"COMPLETE", "PRUNED"}


def test_every_measurement_records_concurrent_probes_and_their_interference_is_measured(
    tmp_path: Path,
) -> None:
    crowd = Crowd(Machine(limit_bytes=900 * MIB), slowdown=0.2)
    events: list[Event] = []
    answer = run(
        toy_job(tmp_path, toy_space(), crowd.machine.limit_bytes),
        InlineExecutor(crowd.measure, slots=4),
        events,
    )
    disturbance = answer.disturbance
    assert disturbance is not None
    assert disturbance.slower_share == pytest.approx(0.2, abs=0.02)
    assert 1 <= disturbance.beside <= 3
    assert disturbance.by_phase["forward"] == pytest.approx(0.0, abs=0.01)
    for trial in answer.trials:
        if trial.purpose == "confirm":
            assert trial.measurement.beside == 0
    assert any(trial.measurement.beside for trial in answer.trials)
    assert "alone" in note_text(events)
    assert answer.counts.probed == sum(trial.purpose != "confirm" for trial in answer.trials)


def test_one_slot_has_no_interference(tmp_path: Path) -> None:
    crowd = Crowd(Machine(limit_bytes=900 * MIB))
    assert (
        run(toy_job(tmp_path, toy_space(), 900 * MIB), InlineExecutor(crowd.measure)).disturbance
        is None
    )


def test_a_slot_that_is_lost_hands_its_candidate_to_the_others(tmp_path: Path) -> None:
    crowd = Crowd(Machine(limit_bytes=900 * MIB))
    lost: list[str] = []

    def measure(candidate: Candidate, plan: ProbePlan) -> Measurement:
        if threading.current_thread().name == "slot-0":  # it has the baseline
            lost.append(candidate.id)
            raise SlotLost("The node went away.")
        return crowd.measure(candidate, plan)

    events: list[Event] = []
    answer = run(
        toy_job(tmp_path, toy_space(), 900 * MIB), InlineExecutor(measure, slots=3), events
    )
    assert answer.winner is not None
    assert len(lost) == 1
    assert crowd.short[lost[0]] == 1
    assert "Going on without" in note_text(events)


def test_faults_in_a_row_end_the_search_only_when_no_slot_is_left(tmp_path: Path) -> None:
    def broken(candidate: Candidate, plan: ProbePlan) -> Measurement:
        raise ProbeError("This machine is broken.")

    job = stored_toy_job(tmp_path, toy_space(), 900 * MIB)
    with pytest.raises(ProbeError, match="broken"):
        run(job, InlineExecutor(broken, slots=3))
    trials = optuna.load_study(study_name="toy", storage=job.storage).get_trials()
    assert {trial.state.name for trial in trials} == {"FAIL"}


def test_an_interruption_keeps_what_was_measured_and_reopens_the_rest(tmp_path: Path) -> None:
    crowd = Crowd(Machine(limit_bytes=2500 * MIB))
    count = Counter[str]()

    def measure(candidate: Candidate, plan: ProbePlan) -> Measurement:
        count["asked"] += 1
        if count["asked"] == 7:
            raise KeyboardInterrupt
        return crowd.measure(candidate, plan)

    job = stored_toy_job(tmp_path, toy_space(), 2500 * MIB)
    first = run(job, InlineExecutor(measure, slots=3))
    assert first.interrupted
    trials = optuna.load_study(study_name="toy", storage=job.storage).get_trials()
    for trial in trials:
        assert trial.state.name not in ("RUNNING", "WAITING")
    assert (
        sum("measurement" in trial.user_attrs for trial in trials)
        == len(first.trials)
        == sum(crowd.short.values())
    )
    again = run(replace(job, resume=True), InlineExecutor(crowd.measure, slots=3))
    assert not again.interrupted
    assert max(crowd.short.values()) == 1


def test_probes_are_identified_by_their_numbers(tmp_path: Path) -> None:
    crowd = Crowd(Machine(limit_bytes=900 * MIB))
    events = list[Event]()
    run(toy_job(tmp_path, toy_space(), 900 * MIB), InlineExecutor(crowd.measure, slots=4), events)
    started = [event.number for event in events if isinstance(event, ProbeStarted)]
    ended = [event.trial.number for event in events if isinstance(event, ProbeEnded)]
    assert sorted(started) == sorted(ended)
    assert len(set(started)) == len(started)


def test_a_probe_ended_by_the_budget_is_not_repeated(tmp_path: Path) -> None:
    """A machine so slow that the confirmation can't be made in time: the search ends with what
    it has.
    """
    machine = Machine(limit_bytes=900 * MIB)
    trainer = ToyTrainer()
    passed = [0.0]
    begun = list[str]()
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)

    def measure(candidate: Candidate, plan: ProbePlan) -> Measurement:
        measurement = machine.measure(candidate, plan)
        if plan.timed_cycles <= 3:
            return measurement
        begun.append(candidate.id)
        assert len(begun) < 5, "it is begun again and again"
        passed[0] += 1000.0
        return replace(
            measurement,
            outcome=Outcome.TIMEOUT,
            worst=None,
            typical=None,
        )

    study = open_study(job, legal_candidates(job, trainer), baseline_candidate(job, trainer))
    clock = Clock(100.0, now=lambda: passed[0])
    answer = run_search(
        job,
        study=study,
        executor=InlineExecutor(measure),
        listener=lambda event: None,
        clock=clock,
    )
    assert answer.proven == "budget spent"
    assert answer.winner is not None
    assert len(begun) == 1
