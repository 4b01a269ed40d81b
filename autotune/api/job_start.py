"""Start of a job: its event, and the notes that its candidates add."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.core.events import JobStarted
from autotune.core.space import Candidate

if TYPE_CHECKING:
    from autotune.request.job_builder import ParsedRequest


def with_share_notes(request: ParsedRequest, candidates: tuple[Candidate, ...]) -> ParsedRequest:
    """Add what an engine's share means under the memory limit."""
    from autotune.frameworks.shares_in_files import limit_notes

    return replace(request, notes=(*request.notes, *limit_notes(request.job, candidates)))


def job_started(request: ParsedRequest, candidates: tuple[Candidate, ...]) -> JobStarted:
    return JobStarted(
        job=request.job,
        candidates=candidates,
        assumed=request.assumed,
        assumed_of_file=request.assumed_of_file,
        notes=request.notes,
    )
