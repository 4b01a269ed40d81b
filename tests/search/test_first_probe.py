"""First probe of a budget that pays for one: the baseline, or what is predicted to be faster.

Seconds are worked out by hand. A probe starts in 25 s, with an engine in 60 s (the catalogue's
figures), and takes four cycles; a confirmation takes six.

    candidate                                 speed    cycle     probe    confirmation
    baseline: batch 8, checkpointing          266.7    12.2 s    74 s     73 s
    batch 8, none                             320      10.2 s    66 s     61 s
    batch 8, none, engine                     640       5.1 s    80 s     30 s
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from autotune.core.answer import Recommendation
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.prediction import EngineFit, Estimate, PhasePrediction, Prediction
from autotune.core.space import Candidate
from autotune.search.agenda import RemainingBudget
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import TrialRequest, open_study
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_job, toy_space

CYCLE_TOKENS = 3250.0
START_SECONDS, ENGINE_SECONDS = 25.0, 35.0
LIMIT_BYTES = 4000 * MIB
NOTHING = Estimate.exactly(0)
ENGINE = EngineFit(
    kv_cache_bytes=NOTHING,
    kv_cache_tokens=1,
    concurrency=1,
    longest_length=1,
)


@dataclass
class TimedMachine(Machine):
    """Machine whose starts and cycles take the seconds of the table above."""

    now: float = 0.0
    live: str | None = None

    def cycle_seconds(self, candidate: Candidate) -> float:
        return CYCLE_TOKENS / self.speed(candidate)

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        load_seconds = 0.0
        if candidate.load_key != self.live:
            load_seconds = START_SECONDS
            if candidate.knobs["use_vllm"]:
                load_seconds += ENGINE_SECONDS
        self.live = candidate.load_key
        cycles = plan.warmup_cycles + plan.timed_cycles
        seconds = load_seconds + cycles * self.cycle_seconds(candidate)
        self.now += seconds
        measurement = super().measure(candidate, plan)
        cost = replace(measurement.cost, total_seconds=seconds, load_seconds=load_seconds)
        return replace(measurement, cost=cost)


def predictions_of(machine: TimedMachine, candidates: list[Candidate]) -> dict[str, Prediction]:
    predictions = {}
    for candidate in candidates:
        prediction = Oracle(machine, off=0.05).predict(candidate)
        seconds = machine.cycle_seconds(candidate)
        estimate = Estimate(
            value=seconds,
            low=0.95 * seconds,
            high=1.05 * seconds,
        )
        rollout = PhasePrediction(
            name="rollout",
            peak_bytes=prediction.peak_memory_bytes,
            seconds=estimate,
        )
        engine = ENGINE if candidate.knobs["use_vllm"] else None
        predictions[candidate.id] = replace(prediction, phases=(rollout,), engine=engine)
    return predictions


Change = Callable[[Candidate, Prediction], Prediction]


def unchanged(candidate: Candidate, prediction: Prediction) -> Prediction:
    return prediction


def search(
    folder: Path,
    budget_seconds: float,
    change: Change = unchanged,
) -> tuple[Recommendation, TimedMachine]:
    machine = TimedMachine(limit_bytes=LIMIT_BYTES)
    space = toy_space(
        batch=(8,),
        num_generations=(8,),
        max_completion_length=(64,),
    )
    job = toy_job(folder, space, LIMIT_BYTES, storage="memory://")
    candidates = list(legal_candidates(job, ToyTrainer()))
    predictions = predictions_of(machine, candidates)
    for candidate in candidates:
        predictions[candidate.id] = change(candidate, predictions[candidate.id])
    baseline = baseline_candidate(job, ToyTrainer())
    study = open_study(job, candidates, baseline, predictions)
    answer = run_search(
        job,
        study=study,
        executor=InlineExecutor(measure=machine.measure),
        listener=lambda event: None,
        clock=Clock(budget_seconds, now=lambda: machine.now),
    )
    return answer, machine


def first(machine: TimedMachine) -> tuple[bool, bool]:
    """Return whether the first probe had an engine, and checkpointing."""
    knobs = machine.asked[0][0].knobs
    return bool(knobs["use_vllm"]), bool(knobs["checkpointing"])


def test_what_is_predicted_faster_is_measured_where_the_budget_pays_for_one(tmp_path: Path) -> None:
    """74 s for the baseline and 80 + 30 s for the engine's do not fit into 130 s."""
    answer, machine = search(tmp_path, 130.0)
    assert first(machine) == (True, False)
    assert answer.winner is not None and answer.winner.candidate.knobs["use_vllm"] is True
    assert answer.certificate is not None, "80 s and 30 s are less than 130 s"
    assert machine.now < 130.0


def test_the_baseline_is_measured_first_where_the_budget_pays_for_both(tmp_path: Path) -> None:
    """74 + 80 + 30 = 184 s."""
    answer, machine = search(tmp_path, 190.0)
    assert first(machine) == (False, True)
    assert answer.winner is not None


def test_a_candidate_whose_probe_takes_too_long_is_not_the_first(tmp_path: Path) -> None:
    """In 72 s the engine's 80 s do not fit, but the 66 s without checkpointing."""
    _, machine = search(tmp_path, 72.0)
    assert first(machine) == (False, False)


def test_the_baseline_is_measured_where_nothing_ends_in_time(tmp_path: Path) -> None:
    _, machine = search(tmp_path, 60.0)
    assert first(machine) == (False, True)


def test_a_risk_of_running_out_of_memory_is_not_taken(tmp_path: Path) -> None:
    """A peak of 96 to 99 % of the limit: at the least width of 8 % it may exceed it."""

    def near_the_limit(candidate: Candidate, prediction: Prediction) -> Prediction:
        if candidate.knobs["checkpointing"]:
            return prediction
        peak = Estimate(
            value=0.97 * LIMIT_BYTES,
            low=0.96 * LIMIT_BYTES,
            high=0.99 * LIMIT_BYTES,
        )
        phases = tuple(replace(phase, peak_bytes=peak) for phase in prediction.phases)
        return replace(prediction, peak_memory_bytes=peak, phases=phases)

    _, machine = search(tmp_path, 130.0, near_the_limit)
    assert first(machine)[1] is True


def test_without_predicted_seconds_the_baseline_is_the_first(tmp_path: Path) -> None:
    def without_phases(candidate: Candidate, prediction: Prediction) -> Prediction:
        return replace(prediction, phases=())

    _, machine = search(tmp_path, 130.0, without_phases)
    assert first(machine) == (False, True)


def test_a_second_slot_measures_the_baseline_at_the_same_time(tmp_path: Path) -> None:
    machine = TimedMachine(limit_bytes=LIMIT_BYTES)
    space = toy_space(
        batch=(8,),
        num_generations=(8,),
        max_completion_length=(64,),
    )
    job = toy_job(tmp_path, space, LIMIT_BYTES, storage="memory://")
    candidates = list(legal_candidates(job, ToyTrainer()))
    baseline = baseline_candidate(job, ToyTrainer())
    study = open_study(job, candidates, baseline, predictions_of(machine, candidates))
    purposes = []
    for _ in range(2):
        request = study.ask(RemainingBudget(seconds=130.0, probes=100))
        assert isinstance(request, TrialRequest)
        purposes.append(request.purpose)
    assert purposes == ["search", "baseline"]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_optunas_own_samplers_begin_with_the_baseline(tmp_path: Path, sampler: str) -> None:
    machine = TimedMachine(limit_bytes=LIMIT_BYTES)
    space = toy_space(
        batch=(8,),
        num_generations=(8,),
        max_completion_length=(64,),
    )
    job = toy_job(tmp_path, space, LIMIT_BYTES, storage="memory://", sampler=sampler)
    candidates = list(legal_candidates(job, ToyTrainer()))
    baseline = baseline_candidate(job, ToyTrainer())
    study = open_study(job, candidates, baseline, predictions_of(machine, candidates))
    request = study.ask(RemainingBudget(seconds=130.0, probes=100))
    assert isinstance(request, TrialRequest)
    assert request.candidate == baseline
