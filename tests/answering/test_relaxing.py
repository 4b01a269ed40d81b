"""What gives way when nothing fits as it was asked, and in which order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.answering.answer import Answer, Asked, answer
from autotune.answering.relaxing import in_words, relaxed
from autotune.events import Event, Note
from autotune.executors.inline import InlineExecutor
from autotune.question import Question
from autotune.space import Knob, SearchSpace
from autotune.spaces import load_space
from autotune.trainers.base import Job, PromptLengths
from autotune.tune import legal_candidates
from tests.simulated import MIB, Machine, ToyTrainer, toy_question, toy_space


class WithDataset(ToyTrainer):
    """A trainer whose dataset has a thousand rows."""

    def prompt_lengths(self, job: Job, limit: int | None = None) -> PromptLengths | None:
        kept = 1000 if limit is None else {480: 990, 400: 950, 300: 900}[limit]
        return PromptLengths(rows=1000, kept=kept, percentiles={50: 100, 90: 300, 95: 400, 99: 480, 100: 600})


class Prepared(InlineExecutor):
    """What `answer` needs of the local executor beside opening rigs."""

    def prepare(self) -> dict[str, str]:
        return {"toy": "1.0"}


def _space(**held: object) -> SearchSpace:
    """The shipped GRPO space, as flags would hold it."""
    space = load_space("grpo")
    return space.with_choices({name: (value,) for name, value in held.items()})  # type: ignore[misc]


def _question(space: SearchSpace, folder: Path = Path("/nowhere")) -> Question:
    return toy_question(folder, space, MIB)


def test_prompts_give_way_by_the_datasets_own_percentiles() -> None:
    found = relaxed(_question(_space(max_prompt_length=512)), load_space("grpo"), frozenset(), WithDataset())
    assert found is not None
    assert found.question.space["max_prompt_length"].choices == (512, 480, 400, 300)


def test_without_a_dataset_by_what_the_space_lists_or_by_halves() -> None:
    for held, choices in [(512, (512, 256)), (200, (200, 100, 50))]:
        found = relaxed(_question(_space(max_prompt_length=held)), load_space("grpo"), frozenset(), ToyTrainer())
        assert found is not None and found.question.space["max_prompt_length"].choices == choices


def test_what_is_pinned_gives_way_to_nothing() -> None:
    space = _space(max_prompt_length=512, num_generations=8, max_completion_length=1024)
    found = relaxed(_question(space), load_space("grpo"), frozenset({"num_generations"}), ToyTrainer())
    assert found is not None
    assert found.question.space["num_generations"].choices == (8,)
    assert found.question.space["max_completion_length"].choices == (1024, 512, 256)
    assert relaxed(_question(space), load_space("grpo"), frozenset(space.relax), ToyTrainer()) is None


def test_quantisation_comes_last_and_only_then_is_a_knob() -> None:
    space = load_space("grpo")
    assert space.relax[-1] == "load_in_4bit" and "load_in_4bit" not in space
    found = relaxed(_question(space), space, frozenset(), ToyTrainer())
    assert found is not None and found.question.space["load_in_4bit"].choices == (False, True)


def _asked(folder: Path, limit_mib: int, *, pinned: frozenset[str] = frozenset()) -> tuple[Asked, Machine]:
    """64 tokens and 8 generations were asked for: at least 244 MiB. 4 generations need 204, and 32 tokens 212."""
    whole = toy_space()
    question = toy_question(folder, toy_space(num_generations=(8,), max_completion_length=(64,)), limit_mib * MIB)
    trainer = ToyTrainer()
    asked = Asked(
        question=question, trainer=trainer, candidates=legal_candidates(question, trainer), whole_space=whole, pinned=pinned
    )
    return asked, Machine(limit_bytes=limit_mib * MIB)


def _answer(asked: Asked, machine: Machine, events: list[Event]) -> Answer:
    return answer(asked, Prepared(machine.measure), events.append)  # type: ignore[arg-type]


def test_the_first_that_fits_is_told_with_what_it_changes(tmp_path: Path) -> None:
    asked, machine = _asked(tmp_path, 220)
    events: list[Event] = []
    found = _answer(asked, machine, events)
    assert found.recommendation.winner is not None
    assert found.recommendation.relaxed == {"num_generations": 4}
    assert found.recommendation.changes[0].effect == "learning"
    told = [event.text for event in events if isinstance(event, Note)]
    assert "Nothing fits as it was asked; it fits with num_generations 8 -> 4." in told
    short = [candidate.id for candidate, plan in machine.asked if plan.timed_cycles == 3]
    assert len(short) == len(set(short)), "what the first search measured is not measured again"
    assert found.recommendation.counts.probed == len(short)


def test_the_machine_is_asked_for_less_only_when_nothing_fits(tmp_path: Path) -> None:
    asked, machine = _asked(tmp_path, 600)
    found = _answer(asked, machine, [])
    assert found.recommendation.relaxed == {} and found.question is asked.question
    assert {candidate.knobs["num_generations"] for candidate, _ in machine.asked} == {8}


@pytest.mark.parametrize("limit", [50, 220])
def test_where_it_may_not_or_cannot_help_nothing_fits(tmp_path: Path, limit: int) -> None:
    pinned = frozenset({"num_generations", "max_completion_length"}) if limit == 220 else frozenset[str]()
    asked, machine = _asked(tmp_path, limit, pinned=pinned)
    found = _answer(asked, machine, [])
    assert found.recommendation.winner is None and found.recommendation.proven == "no better candidate possible"


def test_a_second_time_the_wider_answer_comes_from_the_record_at_once(tmp_path: Path) -> None:
    asked, machine = _asked(tmp_path, 220)
    first = _answer(asked, machine, [])
    measured, events = len(machine.asked), list[Event]()
    second = _answer(asked, machine, events)
    assert len(machine.asked) == measured
    assert second.question == first.question and second.recommendation.relaxed == first.recommendation.relaxed
    assert any("--fresh measures again" in event.text for event in events if isinstance(event, Note))
    again = _answer(replace(asked, question=replace(asked.question, fresh=True)), machine, [])
    assert len(machine.asked) > measured and again.recommendation.from_record is None


def test_rows_that_go_are_counted(tmp_path: Path) -> None:
    prompt = Knob(name="max_prompt_length", choices=(512,), effect="learning", memory="grows", says="longest prompt")
    space = replace(toy_space(num_generations=(8,), max_completion_length=(64,)), relax=("max_prompt_length",))
    space = replace(space, knobs=(prompt, *space.knobs))

    class Longer(Machine):
        def need(self, candidate):  # type: ignore[no-untyped-def]
            return super().need(candidate) + candidate.knobs["max_prompt_length"] * MIB

    question, trainer = toy_question(tmp_path, space, 700 * MIB), WithDataset()
    trainer.baseline = lambda space, job: ToyTrainer.baseline(trainer, space, job) | {"max_prompt_length": 512}  # type: ignore[method-assign]
    asked = Asked(question=question, trainer=trainer, candidates=legal_candidates(question, trainer), whole_space=space)
    found = _answer(asked, Longer(limit_bytes=700 * MIB), []).recommendation
    assert found.relaxed == {"max_prompt_length": 400} and found.rows_left_out == 50
    assert "50 rows" in in_words(found, space)
