"""Agenda: the next measurement, and the reason of the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.core.answer import Recommendation, Trial
from autotune.core.events import Event, ProbeEnded
from autotune.core.job import Job
from autotune.core.measurement import Cost, Measurement, ProbePlan
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, Knob, SearchSpace
from autotune.search.agenda import RemainingBudget
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.study import TrialRequest, open_study
from autotune.search.surrogate.estimates import SearchOptions
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_job, toy_space

TRAINER = ToyTrainer()


def search(
    job: Job,
    machine: Machine,
    *,
    predictions: Mapping[str, Prediction] | None = None,
    options: SearchOptions = SearchOptions(),  # noqa: B008
    earlier: tuple[Trial, ...] = (),
) -> tuple[Recommendation, list[ProbeEnded]]:
    candidates = legal_candidates(job, TRAINER)
    baseline = baseline_candidate(job, TRAINER)
    study = open_study(
        job, candidates, baseline, predictions or {}, options=options, earlier=earlier
    )
    events: list[Event] = []
    executor = InlineExecutor(machine.measure)
    answer = run_search(
        job,
        study=study,
        executor=executor,
        listener=events.append,
        clock=Clock(600.0),
    )
    return answer, [event for event in events if isinstance(event, ProbeEnded)]


def asked_about(
    folder: Path,
    limit_mib: int,
    space: SearchSpace | None = None,
) -> tuple[Job, Machine]:
    job = toy_job(folder, space or toy_space(), limit_mib * MIB, storage="memory://")
    return job, Machine(limit_bytes=limit_mib * MIB)


def foreseen(job: Job, machine: Machine, **oracle: float) -> Mapping[str, Prediction]:
    candidates = legal_candidates(job, TRAINER)
    return Oracle(machine=machine, **oracle).screen(candidates)  # type: ignore[arg-type]


def best_speed(job: Job, machine: Machine) -> float:
    fitting = []
    for candidate in legal_candidates(job, TRAINER):
        if machine.need(candidate) <= machine.limit_bytes:
            fitting.append(candidate)
    preferred = []
    for candidate in fitting:
        if (
            candidate.knobs["num_generations"] == 8
            and candidate.knobs["max_completion_length"] == 64
        ):
            preferred.append(candidate)
    return max(machine.speed(candidate) for candidate in preferred)


@pytest.mark.parametrize("limit", [450, 600, 900, 2500])
@pytest.mark.parametrize("bias", [0.87, 1.0, 1.13])
def test_with_predictions_the_best_is_found_in_a_handful_of_probes(
    tmp_path: Path,
    limit: int,
    bias: float,
) -> None:
    job, machine = asked_about(tmp_path, limit)
    answer, _ = search(job, machine, predictions=foreseen(job, machine, bias=bias, off=0.15))
    assert answer.winner is not None
    assert machine.speed(answer.winner.candidate) >= 0.97 * best_speed(job, machine)
    assert answer.counts.probed <= 8
    assert answer.counts.out_of_memory <= 2


def test_the_baseline_is_the_first_even_if_others_are_as_safe_and_faster(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 900)
    _, probes = search(job, machine, predictions=foreseen(job, machine))
    assert probes[0].trial.candidate == baseline_candidate(job, TRAINER)
    assert probes[0].trial.purpose == "baseline"
    assert probes[1].trial.purpose == "search"


def test_where_nothing_else_is_as_safe_the_baseline_is_the_first(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 900)
    completed = foreseen(job, machine)
    baseline = baseline_candidate(job, TRAINER)
    assert baseline is not None
    doubtful = {}
    for name, prediction in completed.items():
        doubtful[name] = (
            prediction
            if name == baseline.id
            else replace(
                prediction, peak_memory_bytes=prediction.peak_memory_bytes.scaled(5.0), fits=None
            )
        )
    _, probes = search(job, machine, predictions=doubtful)
    assert probes[0].trial.candidate == baseline


def test_a_baseline_that_cannot_fit_is_not_run_and_has_the_reason(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 500)
    answer, probes = search(job, machine, predictions=foreseen(job, machine, off=0.02))
    for probe in probes:
        assert probe.trial.purpose != "baseline"
    assert answer.baseline is not None
    assert answer.baseline.measurement.outcome in (
        "screened",
        "implied",
    )
    assert answer.baseline.measurement.worst is None
    assert answer.baseline.measurement.memory.peak_bytes is None
    assert answer.winner is not None and answer.changes, "what differs from it is said all the same"


def test_a_prediction_that_refuses_everything_never_decides_that_nothing_fits(
    tmp_path: Path,
) -> None:
    job, machine = asked_about(tmp_path, 900)
    answer, _ = search(job, machine, predictions=foreseen(job, machine, bias=12.0, off=0.02))
    assert answer.winner is not None, "what was measured outweighs what was predicted"
    assert machine.speed(answer.winner.candidate) >= 0.8 * best_speed(job, machine)


def test_that_nothing_fits_is_measured_and_not_only_predicted(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 50)
    answer, probes = search(job, machine, predictions=foreseen(job, machine, off=0.02))
    assert answer.winner is None
    assert answer.counts.out_of_memory == len(probes) > 0
    assert len(probes) <= 8


def test_a_wrong_refusal_is_detected(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 600)
    answer, _ = search(job, machine, predictions=foreseen(job, machine, bias=1.25, off=0.03))
    assert answer.winner is not None
    assert machine.speed(answer.winner.candidate) >= 0.9 * best_speed(job, machine)
    assert answer.counts.false_refusals <= answer.counts.refused_probed <= 4


def test_measurements_of_earlier_searches_spare_probes_and_are_not_counted_here(
    tmp_path: Path,
) -> None:
    job, machine = asked_about(tmp_path, 600)
    first, _ = search(job, machine)
    second, _ = search(job, machine, earlier=first.trials)
    assert second.winner is not None
    assert first.winner is not None
    assert machine.speed(second.winner.candidate) >= 0.98 * machine.speed(first.winner.candidate)
    assert second.counts.probed < first.counts.probed
    assert second.counts.out_of_memory == 0 < first.counts.out_of_memory


def test_a_resumed_studys_own_trials_count_once(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 900)
    job = replace(job, storage=f"sqlite:///{tmp_path / 'study.db'}")
    first, probes = search(job, machine)
    candidates = legal_candidates(job, TRAINER)
    baseline = baseline_candidate(job, TRAINER)
    resumed = open_study(replace(job, resume=True), candidates, baseline, earlier=first.trials)
    assert len(resumed.trials) == len(probes)
    assert resumed.problem.earlier == ()
    of_others = tuple(
        replace(
            trial,
            measurement=replace(
                trial.measurement, cost=Cost(total_seconds=0.123, load_seconds=0.0)
            ),
        )
        for trial in first.trials
    )
    assert (
        open_study(
            replace(job, resume=True), candidates, baseline, earlier=of_others
        ).problem.earlier
        == of_others
    )


def test_a_complete_search_and_an_interrupted_one_are_marked(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 900)
    assert search(job, machine)[0].proven == "no better candidate possible"
    assert search(replace(job, max_probes=3), machine)[0].proven == "budget spent"


def test_finalists_reopen_no_search(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 900)
    _, probes = search(job, machine)
    purposes = [probe.trial.purpose for probe in probes]
    assert "confirm" in purposes
    assert set(purposes[purposes.index("confirm") :]) == {"confirm"}


def test_a_rig_that_is_loaded_is_preferred_where_the_gain_is_the_same(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 2500)

    def loading(candidate: Candidate, plan: ProbePlan) -> Measurement:
        measured = machine.measure(candidate, plan)
        loads = len(machine.asked) < 2 or machine.asked[-2][0].load_key != candidate.load_key
        cost = replace(
            measured.cost, total_seconds=61.0 if loads else 1.0, load_seconds=60.0 if loads else 0.0
        )
        return replace(measured, cost=cost)

    counts = {}
    for weighed in (True, False):
        machine.asked.clear()
        candidates = legal_candidates(job, TRAINER)
        options = SearchOptions(value_per_second=weighed)
        study = open_study(job, candidates, baseline_candidate(job, TRAINER), options=options)
        answer = run_search(
            job,
            study=study,
            executor=InlineExecutor(loading),
            listener=lambda event: None,
            clock=Clock(1e6),
        )
        counts[weighed] = answer.counts.loads
    assert counts[True] <= counts[False]


def test_many_tiers_are_not_tried_one_by_one(tmp_path: Path) -> None:
    """Skip remote tiers at first, if few of forty lengths fit, and return to them from below."""
    lengths = tuple(range(4000, 0, -100))
    space = toy_space(
        use_vllm=(False,),
        num_generations=(8,),
        max_completion_length=lengths,
    )
    job, machine = asked_about(tmp_path, 1000, space)
    answer, _ = search(job, machine)
    assert answer.winner is not None
    fitting = []
    for candidate in legal_candidates(job, TRAINER):
        if machine.need(candidate) <= machine.limit_bytes:
            fitting.append(candidate)
    assert answer.learning["max_completion_length"] == max(
        int(candidate.knobs["max_completion_length"] or 0) for candidate in fitting
    )
    assert answer.counts.out_of_memory <= 13


def _wide(values: int) -> SearchSpace:
    """Five thousand candidates."""
    neutral_knobs = tuple(
        Knob(
            name=f"knob_{number}",
            choices=tuple(range(1, values + 1)),
            effect="neutral",
            memory="grows",
            says="one of many",
        )
        for number in range(3)
    )
    space = toy_space(num_generations=(8,), max_completion_length=(64,))
    return replace(space, knobs=(*space.knobs, *neutral_knobs))


def test_thousands_of_candidates_are_searched_like_dozens(tmp_path: Path) -> None:
    job, machine = asked_about(tmp_path, 900, _wide(6))
    candidates = legal_candidates(job, TRAINER)
    assert len(candidates) >= 5000
    study = open_study(job, candidates, None, foreseen(job, machine))
    for _ in range(4):
        request = study.ask(RemainingBudget(seconds=600.0, probes=100))
        assert isinstance(request, TrialRequest)
        study.tell(request, machine.measure(request.candidate, ProbePlan()))
    assert study.view.best() is not None
