"""The search on predictions alone, and what is advised, on machines whose optimum is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from autotune.core.answer import Forecast
from autotune.core.composition import Composition
from autotune.core.errors import ProbeError
from autotune.core.job import Job, Task
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate, PhasePrediction, Prediction
from autotune.core.space import Candidate
from autotune.request.job_builder import ParsedRequest
from autotune.search.advice import as_flags, ways_to_fit
from autotune.search.forecast_search import forecast
from autotune.search.loop import baseline_candidate, legal_candidates
from tests.simulated import MIB, Machine, Oracle, ToyTrainer, toy_job, toy_space


def ask(tmp_path: Path, limit: int, **oracle: float) -> tuple[Job, Machine, Forecast]:
    machine = Machine(limit_bytes=limit * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    trainer = ToyTrainer()
    candidates = legal_candidates(job, trainer)
    foresight = Oracle(machine=machine, **oracle)  # type: ignore[arg-type]
    return job, machine, forecast(job, foresight, candidates, baseline_candidate(job, trainer))


@pytest.mark.parametrize("limit", [450, 600, 900, 2500])
def test_names_the_fastest_of_the_preferred_tier_that_surely_fits(
    tmp_path: Path, limit: int
) -> None:
    job, machine, answer = ask(tmp_path, limit)
    assert answer.winner is not None and answer.relaxed == {}
    preferred = {"num_generations": 8, "max_completion_length": 64}
    surely = [
        one
        for one in legal_candidates(job, ToyTrainer())
        if machine.need(one) * 1.1 <= machine.limit_bytes and preferred.items() <= one.knobs.items()
    ]
    assert machine.speed(answer.winner.candidate) == max(machine.speed(one) for one in surely)


def test_learning_knobs_are_relaxed_only_when_nothing_surely_fits(tmp_path: Path) -> None:
    _, _, answer = ask(tmp_path, 230)
    assert answer.winner is not None
    assert answer.relaxed == {"num_generations": 4}
    assert answer.undecided is not None, "the preferred tier may fit, and that is said"
    assert answer.undecided.candidate.knobs["num_generations"] == 8


def test_nothing_fits(tmp_path: Path) -> None:
    _, machine, answer = ask(tmp_path, 120)
    assert answer.winner is None and answer.screened == answer.candidates
    assert answer.nearest_miss is not None
    need = answer.nearest_miss.prediction.peak_memory_bytes.low
    assert need > machine.limit_bytes


def test_undecided_is_not_nothing_fits(tmp_path: Path) -> None:
    _, _, answer = ask(tmp_path, 175, off=0.3)
    assert answer.winner is None
    assert answer.screened < answer.candidates
    assert answer.undecided is not None


def test_the_named_candidate_was_traced(tmp_path: Path) -> None:
    """The screen may be kinder than the full trace: then the next is taken."""
    machine = Machine(limit_bytes=600 * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    candidates = legal_candidates(job, ToyTrainer())

    class Kinder(Oracle):
        def screen(
            self, candidates: object, *, seconds: float | None = None
        ) -> dict[str, Prediction]:
            return {
                name: replace(one, fits=True, depends_on=())
                for name, one in super().screen(candidates).items()  # type: ignore[arg-type]
            }

    foresight = Kinder(machine=machine)
    answer = forecast(job, foresight, candidates, None)
    assert answer.winner is not None
    assert answer.winner.prediction.fits
    assert answer.winner.candidate == foresight.predicted[-1]
    assert len(foresight.predicted) > 1


def test_a_budget_that_ends_leaves_the_best_of_what_was_predicted(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=600 * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    candidates = legal_candidates(job, ToyTrainer())

    class Brief(Oracle):
        def screen(
            self, candidates: Sequence[Candidate], *, seconds: float | None = None
        ) -> dict[str, Prediction]:
            assert seconds == job.budget_seconds
            return super().screen(candidates[:5])

    whole, brief = (
        forecast(job, foresight, candidates, None)
        for foresight in (Oracle(machine=machine), Brief(machine=machine))
    )
    assert not whole.ended_by_budget and whole.predicted == whole.candidates == len(candidates)
    assert brief.ended_by_budget and (brief.predicted, brief.candidates) == (5, len(candidates))
    assert brief.winner is not None and brief.relaxed == {}, "the preferred ones come first"


def _request(job: Job, trainer: ToyTrainer) -> ParsedRequest:
    return ParsedRequest(
        job=job,
        trainer=trainer,
        assumed=(),
        notes=(),
        named={},
        whole_space=job.space,
    )  # type: ignore[arg-type]


def _advice(
    tmp_path: Path, limit: int, **knobs: object
) -> tuple[Candidate, Machine, list[dict[str, object]]]:
    machine = Machine(limit_bytes=limit * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    trainer, oracle = ToyTrainer(), Oracle(machine=machine)
    asked = trainer.complete({**trainer.baseline(job.space, job.task), **knobs}, job.task)  # type: ignore[dict-item]
    ways = ways_to_fit(_request(job, trainer), asked, oracle)
    return (
        asked,
        machine,
        [
            {"change": dict(way.change), "learning": way.learning, "ratio": way.speed_ratio}
            for way in ways
        ],
    )


def test_advice_moves_one_thing_and_neutral_ones_first(tmp_path: Path) -> None:
    asked, machine, ways = _advice(tmp_path, 600)
    assert machine.need(asked) > 600 * MIB
    assert ways[0]["learning"] is False
    assert ways[0]["change"] == {"batch": 4}, "the mildest that fits, not the smallest"
    assert ways[0]["ratio"] == pytest.approx((4 / 2) / (8 / 3))
    assert {"max_completion_length": 32} in [way["change"] for way in ways]
    learning = [way["learning"] for way in ways]
    assert learning == sorted(learning)  # type: ignore[type-var]
    assert all(way["ratio"] is None for way in ways if way["learning"]), (
        "speeds of unlike learning are not compared"
    )


def test_a_change_that_was_measured_not_to_fit_is_no_advice(tmp_path: Path) -> None:
    machine = Machine(limit_bytes=600 * MIB)
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)
    trainer, oracle = ToyTrainer(), Oracle(machine=machine)
    asked = trainer.complete(trainer.baseline(job.space, job.task), job.task)
    refuted = trainer.complete({**asked.knobs, "batch": 4}, job.task)
    changes = [
        way.change
        for way in ways_to_fit(_request(job, trainer), asked, oracle, refuted=[refuted.id])
    ]
    assert {"batch": 2} in changes and {"batch": 4} not in changes


@pytest.mark.parametrize(
    ("peak", "first"), [("sync", {"max_completion_length": 32}), ("backward", {"batch": 4})]
)
def test_where_sync_is_the_peak_an_adapter_handed_over_alone_comes_first(
    peak: Phase,
    first: dict[str, int],
    tmp_path: Path,
) -> None:
    """Trainer whose shorter completions sync the adapter alone: not the fastest change, but the
    cure of the cause.
    """

    class Syncing(ToyTrainer):
        def compose(self, candidate: Candidate, task: Task) -> Composition:
            return SimpleNamespace(
                syncs_adapter_only=candidate.knobs["max_completion_length"] == 32
            )  # type: ignore[return-value]

    class Peaking(Oracle):
        def predict(self, candidate: Candidate) -> Prediction:
            found = super().predict(candidate)
            return replace(
                found,
                phases=(
                    PhasePrediction(
                        name=peak,
                        peak_bytes=found.peak_memory_bytes,
                        seconds=None,
                    ),
                ),
            )

    machine, trainer = Machine(limit_bytes=600 * MIB), Syncing()
    job, oracle = toy_job(tmp_path, toy_space(), machine.limit_bytes), Peaking(machine=machine)
    asked = trainer.complete(trainer.baseline(job.space, job.task), job.task)
    assert ways_to_fit(_request(job, trainer), asked, oracle)[0].change == first


def test_advice_moves_two_things_when_one_is_not_enough(tmp_path: Path) -> None:
    _, _, ways = _advice(tmp_path, 230, max_completion_length=64)
    assert ways and all(len(way["change"]) == 2 for way in ways)  # type: ignore[arg-type]


def test_an_untraceable_change_is_no_advice_and_stops_none(tmp_path: Path) -> None:
    machine, trainer = Machine(limit_bytes=600 * MIB), ToyTrainer()
    job = toy_job(tmp_path, toy_space(), machine.limit_bytes)

    class Losing(Oracle):
        def predict(self, candidate: Candidate) -> Prediction:
            if candidate.knobs["batch"] != 8:
                raise ProbeError("The process that follows the step has ended")
            return super().predict(candidate)

    oracle = Losing(machine=machine)
    asked = trainer.complete({**trainer.baseline(job.space, job.task), "batch": 8}, job.task)
    ways = ways_to_fit(_request(job, trainer), asked, oracle)
    assert ways and all("batch" not in way.change for way in ways)


def test_no_advice_where_nothing_helps(tmp_path: Path) -> None:
    assert _advice(tmp_path, 100)[2] == []


def test_a_change_reads_as_it_is_typed() -> None:
    assert (
        as_flags({"gradient_checkpointing": True, "batch": 4, "dtype": None})
        == "--set gradient_checkpointing=true --set batch=4 --set dtype=null"
    )


def test_an_estimate_holds_its_own_value() -> None:
    with pytest.raises(ValueError, match="within its own interval"):
        Estimate(
            value=3.0,
            low=4.0,
            high=5.0,
        )
    assert (
        Estimate.exactly(2.0)
        + Estimate(
            value=1.0,
            low=0.5,
            high=2.0,
        )
    ) == Estimate(
        value=3.0,
        low=2.5,
        high=4.0,
    )
