"""Parsing of a request: the flags of any command become a job and its trainer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from pathlib import Path

from autotune.core.errors import BadInput, IllegalConfiguration
from autotune.core.job import Job
from autotune.core.space import Candidate, KnobValue
from autotune.frameworks.base import Trainer
from autotune.frameworks.command import NAME
from autotune.request.command_job import EXAMPLE, parse_command_request
from autotune.request.flags import Flags, option_name
from autotune.request.job_builder import ParsedRequest, parse_framework_request

SHELLS = ("bash", "sh")  # programs whose command line names a launch script


def parse_request(flags: Flags) -> ParsedRequest:
    """Parse the flags of one request: about the user's own command, or about a known framework."""
    if flags.framework == NAME:
        return parse_command_request(flags)
    flags = _as_launch(flags)
    if flags.arguments and not flags.script and not flags.from_command:
        raise BadInput("A command of your own needs --framework command.", way_out=f"Write: {EXAMPLE}")
    for name in ("metrics", "speed_pattern", "learning"):
        if getattr(flags, name):
            raise BadInput(
                f"{option_name(name)} is about a command of your own: --framework command.", way_out=f"Write: {EXAMPLE}"
            )
    return parse_framework_request(flags)


def _as_launch(flags: Flags) -> Flags:
    """Return `-- bash run.sh WORDS` as `--from-command run.sh -- WORDS`."""
    shell, *words = flags.arguments or ("",)
    if Path(shell).name not in SHELLS or "-c" in words or flags.script or flags.from_command or flags.config:
        return flags
    words = words[sum(1 for _ in itertools.takewhile(lambda word: word.startswith("-"), words)) :]
    return flags.replace(from_command=words[0], arguments=tuple(words[1:])) if words else flags


def possible_candidates(request: ParsedRequest, legal: Callable[[Job, Trainer], tuple[Candidate, ...]]) -> tuple[Candidate, ...]:
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
    for name, value in ((name, value) for name, values in request.named.items() for value in values):
        if (name, value) in present:
            continue
        reason = _why_never(request, name, value)
        if legal or reason is not None:
            why = reason or "it only matters together with other settings, which are not so here."
            raise IllegalConfiguration(f"{name}={value}: no candidate can have it. {why}", way_out=f"Give {name} another value.")


def _why_never(request: ParsedRequest, name: str, value: KnobValue) -> str | None:
    """Return a reason why all candidates with this value are illegal, if it names the knob."""
    job, trainer = request.job, request.trainer
    for knobs in job.space.with_choices({name: (value,)}).assignments():
        reason = trainer.why_illegal(trainer.complete(knobs, job.task), job.task) if name in knobs else None
        if reason is not None and name in reason:
            return reason
    return None
