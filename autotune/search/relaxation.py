"""Relaxation: if nothing fits at the requested learning knobs, the same job with a wider space.

Knobs are relaxed in the declared order, except those pinned with --hold: first shorter prompts, at
percentiles of the dataset's own lengths, so that the number of dropped rows is known; then the
rest. The order of the tiers makes the first answer that fits the one that relaxes the least.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from autotune.core.answer import Recommendation
from autotune.core.dataset import PromptLengths
from autotune.core.errors import BadInput
from autotune.core.job import Job
from autotune.core.space import Knob, KnobValue, SearchSpace
from autotune.frameworks.base import Trainer
from autotune.request.measured_data import PERCENTILES, PROMPT_KNOB

MAX_HALVINGS = 2  # Halvings of a number for which the space lists no smaller value
SUMMED_COUNTS = (
    "probed",
    "out_of_memory",
    "failed",
    "confirmations",
    "refused_probed",
    "false_refusals",
)
"""Counts of both searches together; the other counts are the second's."""


@dataclass(frozen=True, kw_only=True)
class RelaxedJob:
    """Job with a wider space, and the dataset's prompt lengths."""

    job: Job
    prompts: PromptLengths | None


def relaxed_job(
    job: Job,
    whole_space: SearchSpace,
    pinned: Collection[str],
    trainer: Trainer,
) -> RelaxedJob | None:
    """Return the job to search if nothing of this one fits; None if no knob may be relaxed."""
    names = [name for name in job.space.relax if name not in pinned]
    prompts = None
    if PROMPT_KNOB in names:
        prompts = _prompt_lengths(job, trainer)
    remedies = {knob.name: knob for knob in whole_space.remedies}
    choices: dict[str, tuple[KnobValue, ...]] = {}
    added: list[Knob] = []
    for name in names:
        if name in job.space:
            knob = job.space[name]
            softer = _softer(knob, whole_space, prompts)
            if softer:
                choices[name] = (*knob.choices, *softer)
        elif name in remedies:
            # Its conditions need not be knobs of the space: the trainer decides about legality.
            always_applied = replace(remedies[name], when={})
            added.append(always_applied)
    if not choices and not added:
        return None
    space = job.space.with_choices(choices)
    knobs = (*space.knobs, *added)
    space = replace(space, knobs=knobs)
    wider_job = replace(job, space=space, study_name=f"{job.study_name}-relaxed")
    return RelaxedJob(job=wider_job, prompts=prompts)


def _softer(
    knob: Knob,
    whole_space: SearchSpace,
    prompts: PromptLengths | None,
) -> tuple[KnobValue, ...]:
    """Return further values below the least preferred one, mildest first."""
    last = knob.choices[-1]
    listed: tuple[KnobValue, ...] = ()
    if knob.name in whole_space:
        listed = whole_space[knob.name].choices
    if not isinstance(last, int) or isinstance(last, bool):
        return tuple(value for value in listed if value not in knob.choices)
    if knob.name == PROMPT_KNOB and prompts is not None:
        lengths = [prompts.percentiles.get(share) for share in PERCENTILES]
        return _descending(lengths, last)
    shifts = range(1, MAX_HALVINGS + 1)
    halves = [last >> times for times in shifts]
    return _descending(listed, last) or _descending(halves, last)


def _descending(values: Iterable[object], below: int) -> tuple[int, ...]:
    numbers = [value for value in values if isinstance(value, int)]
    smaller = {value for value in numbers if 0 < value < below}
    return tuple(sorted(smaller, reverse=True))


def combined(
    first: Recommendation,
    second: Recommendation,
    rows_left_out: int | None,
) -> Recommendation:
    """Return the second search's answer with the measurements of both."""
    counts = {}
    for name in SUMMED_COUNTS:
        before = getattr(first.counts, name)
        counts[name] = before + getattr(second.counts, name)
    baseline = second.baseline
    if baseline is None or not baseline.verdict.fits:
        baseline = first.baseline
    return replace(
        second,
        baseline=baseline,
        counts=replace(second.counts, **counts),
        trials=(*first.trials, *second.trials),
        probe_seconds=first.probe_seconds + second.probe_seconds,
        rows_left_out=rows_left_out,
    )


def rows_left_out(
    relaxed: RelaxedJob,
    answer: Recommendation,
    trainer: Trainer,
) -> int | None:
    """Return the number of dataset rows beyond the answer's shorter prompts; None if prompts
    were not relaxed.
    """
    if answer.winner is None or PROMPT_KNOB not in answer.relaxed or relaxed.prompts is None:
        return None
    settings = answer.winner.candidate.settings
    limit = settings.get(PROMPT_KNOB)
    if not isinstance(limit, int):
        return None
    lengths = _prompt_lengths(relaxed.job, trainer, limit)
    if lengths is None:
        return None
    return lengths.rows - lengths.kept


def _prompt_lengths(
    job: Job,
    trainer: Trainer,
    limit: int | None = None,
) -> PromptLengths | None:
    """Return the lengths of the data's prompts; None if they can't be read."""
    try:
        return trainer.prompt_lengths(job.task, limit)
    except BadInput:
        return None


def describe_relaxation(answer: Recommendation, space: SearchSpace) -> str:
    """Return one sentence about the relaxed knobs, with the rows that are left out."""
    relaxed = []
    for name, value in answer.relaxed.items():
        preferred: KnobValue = False
        if name in space:
            preferred = space[name].choices[0]
        relaxed.append(f"{name} {preferred} -> {value}")
    left_out = ""
    if answer.rows_left_out:
        left_out = f"; {answer.rows_left_out} rows of the dataset are longer and left out"
    return f"Nothing fits as it was asked; it fits with {', '.join(relaxed)}{left_out}."
