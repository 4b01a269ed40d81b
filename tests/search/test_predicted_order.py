"""A search on emulated GPUs: the predicted best first, its confirmation, then the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.answer import Recommendation
from autotune.core.events import Event, ProbeEnded
from autotune.core.job import Hardware, Job
from autotune.core.measurement import Measurement, Outcome, ProbePlan
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import open_study
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_job, toy_space

TRAINER = ToyTrainer()


def on_emulated_gpus(folder: Path, limit_mib: int) -> tuple[Job, Machine]:
    job = toy_job(folder, toy_space(), limit_mib * MIB, storage="memory://")
    hardware = Hardware(
        kind="cuda",
        name="A100-40G",
        count=1,
        memory_bytes=limit_mib * MIB,
        here=True,
        emulated=True,
    )
    task = replace(job.task, hardware=hardware)
    return replace(job, task=task, mode="emulate"), Machine(limit_bytes=limit_mib * MIB)


def search(
    job: Job,
    machine: Machine,
    predictions: Mapping[str, Prediction],
    *,
    seconds: float = 600.0,
) -> tuple[Recommendation, list[ProbeEnded]]:
    def emulated(candidate: Candidate, plan: ProbePlan) -> Measurement:
        return replace(machine.measure(candidate, plan), emulated=True)

    candidates, baseline = legal_candidates(job, TRAINER), baseline_candidate(job, TRAINER)
    events: list[Event] = []
    answer = run_search(
        job,
        study=open_study(job, candidates, baseline, predictions),
        executor=InlineExecutor(emulated),
        listener=events.append,
        clock=Clock(seconds),
    )
    return answer, [event for event in events if isinstance(event, ProbeEnded)]


def predicted(job: Job, machine: Machine, **oracle: float) -> Mapping[str, Prediction]:
    oracle_of_machine = Oracle(machine=machine, **oracle)  # type: ignore[arg-type]
    return oracle_of_machine.screen(legal_candidates(job, TRAINER))


def fastest_that_fits(job: Job, machine: Machine) -> float:
    """Speed by the machine's own formulas, among the most preferred learning knobs."""
    speeds = []
    for candidate in legal_candidates(job, TRAINER):
        preferred = candidate.knobs["num_generations"] == 8
        preferred = preferred and candidate.knobs["max_completion_length"] == 64
        if preferred and machine.need(candidate) <= machine.limit_bytes:
            speeds.append(machine.speed(candidate))
    return max(speeds)


def test_the_predicted_best_is_confirmed_before_the_baseline(tmp_path: Path) -> None:
    job, machine = on_emulated_gpus(tmp_path, 2500)
    answer, probes = search(job, machine, predicted(job, machine))
    assert [probe.trial.purpose for probe in probes] == ["search", "confirm", "baseline"]
    best = probes[0].trial.candidate
    assert probes[1].trial.candidate == best
    assert machine.speed(best) >= 0.95 * fastest_that_fits(job, machine)
    assert answer.winner is not None and answer.winner.candidate == best
    assert answer.certificate is not None and answer.baseline is not None
    assert answer.proven == "no better candidate possible"


def test_what_does_not_fit_gives_place_to_the_next_fastest(tmp_path: Path) -> None:
    # Predictions see two thirds of the memory that is needed, so that the first ones run out.
    job, machine = on_emulated_gpus(tmp_path, 600)
    answer, probes = search(job, machine, predicted(job, machine, bias=0.66, off=0.02))
    outcomes = [probe.trial.measurement.outcome for probe in probes]
    assert outcomes[0].is_out_of_memory
    purposes = [probe.trial.purpose for probe in probes]
    assert "baseline" not in purposes[: purposes.index("confirm")]
    assert answer.winner is not None
    assert machine.speed(answer.winner.candidate) >= 0.95 * fastest_that_fits(job, machine)


def test_a_budget_for_two_probes_goes_into_the_best_and_not_into_the_baseline(
    tmp_path: Path,
) -> None:
    job, machine = on_emulated_gpus(tmp_path, 2500)
    job = replace(job, max_probes=1)
    answer, probes = search(job, machine, predicted(job, machine))
    assert [probe.trial.purpose for probe in probes] == ["search", "confirm"]
    assert answer.winner is not None and answer.certificate is not None


def test_without_predicted_speeds_the_baseline_stays_first(tmp_path: Path) -> None:
    job, machine = on_emulated_gpus(tmp_path, 2500)
    without = {}
    for name, prediction in predicted(job, machine).items():
        without[name] = replace(prediction, tokens_per_second=None)
    _, probes = search(job, machine, without)
    assert probes[0].trial.purpose == "baseline"
    # Without any speed, a second confirmation would tell no more than the first.
    confirmed = []
    for probe in probes:
        if probe.trial.purpose == "confirm":
            confirmed.append(probe.trial.candidate.id)
    assert len(confirmed) == len(set(confirmed))


@pytest.mark.parametrize("limit_mib", [450, 600, 900])
def test_tight_limits_take_few_probes(tmp_path: Path, limit_mib: int) -> None:
    job, machine = on_emulated_gpus(tmp_path, limit_mib)
    answer, probes = search(job, machine, predicted(job, machine, bias=1.0, off=0.05))
    assert answer.winner is not None
    assert machine.speed(answer.winner.candidate) >= 0.95 * fastest_that_fits(job, machine)
    assert len(probes) <= 4
    failed = [probe for probe in probes if probe.trial.measurement.outcome is Outcome.CRASH]
    assert not failed
