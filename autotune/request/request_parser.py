"""Parsing of a request: the flags of any command become a job and its trainer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from autotune.core.errors import BadInput, IllegalConfiguration
from autotune.core.job import Job
from autotune.core.space import Candidate, KnobValue
from autotune.frameworks.base import Trainer
from autotune.frameworks.command import NAME
from autotune.request.command_job import EXAMPLE, parse_command_request
from autotune.request.flags import Flags, option_name
from autotune.request.job_builder import ParsedRequest, parse_framework_request

PROMPT_KNOB = "max_prompt_length"
PERCENTILES = (99, 95, 90)  # percentiles of the dataset's prompt lengths to try as shorter limits
SHELLS = ("bash", "sh")  # programs whose command line names a launch script


def parse_request(flags: Flags, *, limit_prompts: bool = False) -> ParsedRequest:
    """Parse the flags of one request: about the user's own command, or about a known framework.
    `limit_prompts` measures the user's data, and limits prompts to the longest one unless a
    limit is given.
    """
    if flags.framework == NAME:
        return parse_command_request(flags)
    flags = _as_launch(flags)
    if flags.arguments and not flags.script and not flags.from_command:
        raise BadInput(
            "A command of your own needs --framework command.", way_out=f"Write: {EXAMPLE}"
        )
    for name in ("metrics", "speed_pattern", "learning"):
        if getattr(flags, name):
            raise BadInput(
                f"{option_name(name)} is about a command of your own: --framework command.",
                way_out=f"Write: {EXAMPLE}",
            )
    request = parse_framework_request(flags)
    return _with_longest_prompt(request) if limit_prompts else request


def _with_longest_prompt(request: ParsedRequest) -> ParsedRequest:
    """Limit prompts to the longest one of the data: TRL truncates none, so a lower limit leaves
    rows out, which changes what is learned. Unreadable data leave the space's limit, with a
    note.
    """
    job, workload = request.job, request.job.task.workload
    if PROMPT_KNOB not in job.space or PROMPT_KNOB in request.named or PROMPT_KNOB in workload.held:
        return request
    try:
        found = request.trainer.prompt_lengths(job.task)
    except BadInput as error:
        limit = job.space[PROMPT_KNOB].choices[0]
        note = (
            f"{error.what} Prompts are limited to {limit} tokens, and rows with longer ones left"
            " out: --max-prompt-length N"
        )
        return replace(request, notes=(*request.notes, f"{note} sets another limit"))
    if found is None:
        return request
    images = 0 if workload.images is None else workload.images.row_tokens
    longest = found.percentiles[100] + images
    shorter = sorted(
        {found.percentiles[share] + images for share in PERCENTILES if share in found.percentiles}
        - {longest}
    )
    workload = replace(workload, held={**workload.held, PROMPT_KNOB: longest})
    space = job.space.with_choices({PROMPT_KNOB: (longest,)})
    return replace(
        request,
        job=replace(job, task=replace(job.task, workload=workload), space=space),
        whole_space=request.whole_space.with_choices({PROMPT_KNOB: (longest, *reversed(shorter))}),
        assumed=(
            *request.assumed,
            f"prompts of up to {longest} tokens, the longest of the {found.rows:,} rows",
        ),
    )


def _as_launch(flags: Flags) -> Flags:
    """Return `-- bash run.sh WORDS` as `--from-command run.sh -- WORDS`."""
    shell, *words = flags.arguments or ("",)
    if (
        Path(shell).name not in SHELLS
        or "-c" in words
        or flags.script
        or flags.from_command
        or flags.config
    ):
        return flags
    words = words[sum(1 for _ in itertools.takewhile(lambda word: word.startswith("-"), words)) :]
    return flags.replace(from_command=words[0], arguments=tuple(words[1:])) if words else flags


def possible_candidates(
    request: ParsedRequest, legal: Callable[[Job, Trainer], tuple[Candidate, ...]]
) -> tuple[Candidate, ...]:
    """Return the legal candidates. A named value that no candidate has is an error."""
    try:
        candidates = legal(request.job, request.trainer)
    except BadInput:
        # No candidate is legal: prefer a reason that concerns the named values.
        _refuse_impossible_values(request, ())
        raise
    _refuse_impossible_values(request, candidates)
    return candidates


def _refuse_impossible_values(request: ParsedRequest, legal: Collection[Candidate]) -> None:
    present = {(name, value) for candidate in legal for name, value in candidate.knobs.items()}
    for name, value in (
        (name, value) for name, values in request.named.items() for value in values
    ):
        if (name, value) in present:
            continue
        reason = _why_never(request, name, value)
        if legal or reason is not None:
            why = reason or "it only matters together with other settings, which are not so here."
            raise IllegalConfiguration(
                f"{name}={value}: no candidate can have it. {why}",
                way_out=f"Give {name} another value.",
            )


def _why_never(request: ParsedRequest, name: str, value: KnobValue) -> str | None:
    """Return a reason why all candidates with this value are illegal, if it names the knob."""
    job, trainer = request.job, request.trainer
    for knobs in job.space.with_choices({name: (value,)}).assignments():
        reason = (
            trainer.why_illegal(trainer.complete(knobs, job.task), job.task)
            if name in knobs
            else None
        )
        if reason is not None and name in reason:
            return reason
    return None
