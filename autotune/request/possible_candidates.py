"""Legal candidates of a request. A value that a flag names has to be possible in one of them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from autotune.core.candidate import Candidate, KnobValue
from autotune.core.errors import BadInput, IllegalConfiguration
from autotune.core.job import Job
from autotune.frameworks.base import Trainer
from autotune.request.job_builder import ParsedRequest


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
