"""When nothing fits with what is learned as it was asked for: the same question with learning knobs that may give way.

They give way in the declared order, and only those that the user has not pinned with --hold: first shorter prompts, by the
percentiles of the dataset's own lengths, so that it is known how many rows would go; then what else the space names.
Everything neutral was tried before. The order of the tiers makes the first answer that fits the one that gives up the least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from autotune.candidate import KnobValue
from autotune.question import Question
from autotune.recommendation import Recommendation
from autotune.space import Knob, SearchSpace
from autotune.trainers.base import PromptLengths, Trainer

PROMPTS = "max_prompt_length"
KEPT = (99, 95, 90)
"""Percentiles of the dataset's prompts that a shorter limit is tried at."""

HALVINGS = 2
"""A number for which the space lists nothing smaller is halved so often."""


@dataclass(frozen=True, kw_only=True)
class Relaxed:
    """A question in which more may move, and what its dataset says about prompts."""

    question: Question
    prompts: PromptLengths | None


def relaxed(question: Question, whole_space: SearchSpace, pinned: Collection[str], trainer: Trainer) -> Relaxed | None:
    """The question to ask when nothing of this one fits; None where nothing may give way."""
    names = [name for name in question.space.relax if name not in pinned]
    prompts = trainer.prompt_lengths(question.job) if PROMPTS in names else None
    choices: dict[str, tuple[KnobValue, ...]] = {}
    added: list[Knob] = []
    for name in names:
        knob = _knob(name, question.space, whole_space)
        if knob is None:
            continue
        softer = _softer(knob, whole_space, prompts)
        if softer and name in question.space:
            choices[name] = (*knob.choices, *softer)
        elif name not in question.space:
            # What it goes with is a knob of the space no more than it is itself: whether it is legal is the trainer's to say.
            added.append(replace(knob, when={}))
    if not choices and not added:
        return None
    space = question.space.with_choices(choices)
    space = replace(space, knobs=(*space.knobs, *added))
    return Relaxed(question=replace(question, space=space, study_name=f"{question.study_name}-relaxed"), prompts=prompts)


def _knob(name: str, asked: SearchSpace, whole: SearchSpace) -> Knob | None:
    """As it was asked; a remedy, which is never searched, as the space describes it."""
    remedies = {knob.name: knob for knob in whole.remedies}
    return asked[name] if name in asked else remedies.get(name)


def _softer(knob: Knob, whole: SearchSpace, prompts: PromptLengths | None) -> tuple[KnobValue, ...]:
    """What to give way to from the least preferred value that was asked for, the mildest first."""
    last = knob.choices[-1]
    if not isinstance(last, int) or isinstance(last, bool):
        listed = whole[knob.name].choices if knob.name in whole else ()
        return tuple(value for value in listed if value not in knob.choices)
    if knob.name == PROMPTS and prompts is not None:
        return _descending((prompts.percentiles.get(share) for share in KEPT), last)
    listed = whole[knob.name].choices if knob.name in whole else ()
    below = _descending((value for value in listed if isinstance(value, int)), last)
    return below or _descending((last >> times for times in range(1, HALVINGS + 1)), last)


def _descending(values: Iterable[object], below: int) -> tuple[int, ...]:
    found = {value for value in values if isinstance(value, int) and 0 < value < below}
    return tuple(sorted(found, reverse=True))


def with_both(first: Recommendation, second: Recommendation, rows_left_out: int | None) -> Recommendation:
    """The second search's answer, with what both of them measured."""
    one, two = first.counts, second.counts
    counts = replace(
        two,
        probed=one.probed + two.probed,
        out_of_memory=one.out_of_memory + two.out_of_memory,
        failed=one.failed + two.failed,
        confirmations=one.confirmations + two.confirmations,
        refused_probed=one.refused_probed + two.refused_probed,
        false_refusals=one.false_refusals + two.false_refusals,
    )
    return replace(
        second,
        baseline=first.baseline if second.baseline is None or not second.baseline.verdict.fits else second.baseline,
        counts=counts,
        trials=(*first.trials, *second.trials),
        probe_seconds=first.probe_seconds + second.probe_seconds,
        rows_left_out=rows_left_out,
    )


def rows_left_out(found: Relaxed, answer: Recommendation, trainer: Trainer) -> int | None:
    """How many rows of the dataset the answer's shorter prompts leave out; None where prompts did not give way."""
    if answer.winner is None or PROMPTS not in answer.relaxed or found.prompts is None:
        return None
    limit = answer.winner.candidate.settings.get(PROMPTS)
    within = trainer.prompt_lengths(found.question.job, limit) if isinstance(limit, int) else None
    return None if within is None else within.rows - within.kept


def in_words(answer: Recommendation, asked: SearchSpace) -> str:
    """What gave way, in a sentence; the dataset's rows among it."""
    moved = [f"{name} {_asked_for(asked, name)} -> {value}" for name, value in answer.relaxed.items()]
    left_out = f"; {answer.rows_left_out} rows of the dataset are longer and left out" if answer.rows_left_out else ""
    return f"Nothing fits as it was asked; it fits with {', '.join(moved)}{left_out}."


def _asked_for(asked: SearchSpace, name: str) -> KnobValue:
    return asked[name].choices[0] if name in asked else False
