"""Relaxation of learning knobs if nothing fits, in the declared order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.catalog.space_files import load_space
from autotune.core.dataset import PromptLengths
from autotune.core.events import Event
from autotune.core.job import Job, Task
from autotune.core.measurement import Outcome
from autotune.core.space import Knob, SearchSpace
from autotune.frameworks.base import Trainer
from autotune.request.job_builder import ParsedRequest
from autotune.search.loop import legal_candidates
from autotune.search.pipeline import SearchAnswer, answer
from autotune.search.relaxation import describe_relaxation, relaxed_job
from tests.inline_executor import InlineExecutor
from tests.simulated import MIB, Machine, ToyTrainer, note_text, toy_job, toy_space


class WithDataset(ToyTrainer):
    """A trainer whose dataset has a thousand rows."""

    def prompt_lengths(self, task: Task, limit: int | None = None) -> PromptLengths | None:
        rows_kept = 1000 if limit is None else {480: 990, 400: 950, 300: 900}[limit]
        return PromptLengths(
            rows=1000,
            kept=rows_kept,
            percentiles={50: 100, 90: 300, 95: 400, 99: 480, 100: 600},
        )


class Prepared(InlineExecutor):
    """Executor with the versions that `answer` requires."""

    def prepare(self) -> dict[str, str]:
        return {"toy": "1.0"}


def _space(**pinned: object) -> SearchSpace:
    """The shipped GRPO space, as flags would hold it."""
    space = load_space("grpo")
    choices = {name: (value,) for name, value in pinned.items()}
    return space.with_choices(choices)  # type: ignore[arg-type]


def _question(space: SearchSpace, folder: Path = Path("/nowhere")) -> Job:
    return toy_job(folder, space, MIB)


def test_prompts_are_relaxed_at_the_datasets_percentiles() -> None:
    relaxed = relaxed_job(
        _question(_space(max_prompt_length=512)), load_space("grpo"), frozenset(), WithDataset()
    )
    assert relaxed is not None
    assert relaxed.job.space["max_prompt_length"].choices == (512, 480, 400, 300)


def test_without_a_dataset_values_are_relaxed_by_the_spaces_list_or_by_halves() -> None:
    for length, choices in [(512, (512, 256)), (200, (200, 100, 50))]:
        relaxed = relaxed_job(
            _question(_space(max_prompt_length=length)),
            load_space("grpo"),
            frozenset(),
            ToyTrainer(),
        )
        assert relaxed is not None
        assert relaxed.job.space["max_prompt_length"].choices == choices


def test_a_pinned_knob_is_never_relaxed() -> None:
    space = _space(
        max_prompt_length=512,
        num_generations=8,
        max_completion_length=1024,
    )
    relaxed = relaxed_job(
        _question(space), load_space("grpo"), frozenset({"num_generations"}), ToyTrainer()
    )
    assert relaxed is not None
    assert relaxed.job.space["num_generations"].choices == (8,)
    assert relaxed.job.space["max_completion_length"].choices == (1024, 512, 256)
    assert (
        relaxed_job(_question(space), load_space("grpo"), frozenset(space.relax), ToyTrainer())
        is None
    )


def test_quantisation_comes_last_and_only_then_is_a_knob() -> None:
    space = load_space("grpo")
    assert space.relax[-1] == "load_in_4bit"
    assert "load_in_4bit" not in space
    relaxed = relaxed_job(_question(space), space, frozenset(), ToyTrainer())
    assert relaxed is not None
    assert relaxed.job.space["load_in_4bit"].choices == (False, True)


def _asked(
    folder: Path,
    limit_mib: int,
    *,
    pinned: frozenset[str] = frozenset(),
) -> tuple[ParsedRequest, Machine]:
    """Requested: 64 tokens and 8 generations, at least 244 MiB. 4 generations need 204 MiB, 32
    tokens 212 MiB.
    """
    space = toy_space()
    job = toy_job(
        folder, toy_space(num_generations=(8,), max_completion_length=(64,)), limit_mib * MIB
    )
    return _request(job, ToyTrainer(), space, pinned), Machine(limit_bytes=limit_mib * MIB)


def _request(
    job: Job,
    trainer: Trainer,
    whole_space: SearchSpace,
    pinned: frozenset[str] = frozenset(),
) -> ParsedRequest:
    return ParsedRequest(
        job=job,
        trainer=trainer,
        assumed=(),
        notes=(),
        flag_choices={},
        whole_space=whole_space,
        pinned=pinned,
    )


def _answer(
    request: ParsedRequest,
    machine: Machine,
    events: list[Event],
) -> SearchAnswer:
    return answer(
        request,
        legal_candidates(request.job, request.trainer),
        Prepared(machine.measure),
        events.append,
    )  # type: ignore[arg-type]


def test_the_first_that_fits_is_reported_with_its_changes(tmp_path: Path) -> None:
    request, machine = _asked(tmp_path, 220)
    events: list[Event] = []
    result = _answer(request, machine, events)
    assert result.recommendation.winner is not None
    assert result.recommendation.relaxed == {"num_generations": 4}
    assert result.recommendation.changes[0].effect == "learning"
    completed = "Nothing fits as it was asked; it fits with num_generations 8 -> 4."
    assert completed in note_text(events).splitlines()
    short = machine.short_probes()
    assert len(short) == len(set(short)), "what the first search measured is not measured again"
    assert result.recommendation.counts.probed == len(short)


def test_knobs_are_relaxed_only_when_nothing_fits(tmp_path: Path) -> None:
    request, machine = _asked(tmp_path, 600)
    result = _answer(request, machine, [])
    assert result.recommendation.relaxed == {}
    assert result.job is request.job
    assert {candidate.knobs["num_generations"] for candidate, _ in machine.asked} == {8}


@pytest.mark.parametrize("limit", [50, 220])
def test_where_it_may_not_or_cannot_help_nothing_fits(tmp_path: Path, limit: int) -> None:
    pinned = (
        frozenset({"num_generations", "max_completion_length"})
        if limit == 220
        else frozenset[str]()
    )
    request, machine = _asked(tmp_path, limit, pinned=pinned)
    result = _answer(request, machine, [])
    assert result.recommendation.winner is None
    assert result.recommendation.proven == "nothing fits"


def test_a_second_time_the_wider_answer_comes_from_the_record_at_once(tmp_path: Path) -> None:
    request, machine = _asked(tmp_path, 220)
    first = _answer(request, machine, [])
    measured, events = len(machine.asked), list[Event]()
    second = _answer(request, machine, events)
    assert len(machine.asked) == measured
    assert second.job == first.job
    assert second.recommendation.relaxed == first.recommendation.relaxed
    assert "--fresh measures again" in note_text(events)
    again = _answer(replace(request, job=replace(request.job, fresh=True)), machine, [])
    assert len(machine.asked) > measured
    assert again.recommendation.from_record is None


def test_rows_that_go_are_counted(tmp_path: Path) -> None:
    prompt = Knob(
        name="max_prompt_length",
        choices=(512,),
        effect="learning",
        memory="grows",
        says="longest prompt",
    )
    space = replace(
        toy_space(num_generations=(8,), max_completion_length=(64,)), relax=("max_prompt_length",)
    )
    space = replace(space, knobs=(prompt, *space.knobs))

    class Longer(Machine):
        def need(self, candidate):  # type: ignore[no-untyped-def]
            return super().need(candidate) + candidate.knobs["max_prompt_length"] * MIB

    job = toy_job(tmp_path, space, 700 * MIB)
    trainer = WithDataset()
    trainer.baseline = lambda space, task: (
        ToyTrainer.baseline(trainer, space, task) | {"max_prompt_length": 512}
    )  # type: ignore[method-assign]
    recommendation = _answer(
        _request(job, trainer, space), Longer(limit_bytes=700 * MIB), []
    ).recommendation
    assert recommendation.relaxed == {"max_prompt_length": 400}
    assert recommendation.rows_left_out == 50
    assert "50 rows" in describe_relaxation(recommendation, space)


def test_crashes_do_not_relax_learning_knobs(tmp_path: Path) -> None:
    request, machine = _asked(tmp_path, 220)
    events: list[Event] = []
    candidates = legal_candidates(request.job, request.trainer)
    first = candidates[0]
    machine.outcomes = {
        candidate.id: Outcome.CRASH
        for candidate in candidates
        if candidate.knobs["batch"] == first.knobs["batch"]
    }
    result = _answer(request, machine, events)
    assert result.recommendation.winner is None
    assert result.job == request.job
    assert "not relaxed" in note_text(events)
