"""Room that a run has shown by running out of memory. With P the predicted peak of its
configuration, and M the bytes that were missing when it was refused, another one is predicted to
need at most

    room = 0.97 P - M

P is predicted at the rows that were refused, where they are known. Rows before that step fitted, so
it had no shorter ones: the longest completion of the earlier steps replaces unknown rows.

    A GPU of 40 GiB held 39 GiB, and 3 GiB were requested: M = 2 GiB. P was 36 GiB: the run needed
    6 GiB more than predicted (longer rows, another process), and so will the next one. Its
    predicted peak is at most 32.9 GiB.

Predictions of two similar configurations err alike, so their values are compared, not their bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autotune.core.answer import WayToFit
from autotune.core.job import Job
from autotune.core.space import Candidate
from autotune.failures.numbers import Numbers
from autotune.frameworks.shares_in_files import with_room
from autotune.prediction.guarded_runs import GuardedRun, RefusedRows
from autotune.prediction.service import PredictionService
from autotune.prediction.step_rows import StepRows
from autotune.request.job_builder import ParsedRequest
from autotune.search.advice import ways_to_fit

RESERVE_SHARE = 0.03  # of the predicted peak: rows may get longer than those that were refused
UNKNOWN_REQUEST_SHARE = 0.05  # of the peak, where no message says what was requested
PHASES_WITH_ROWS = frozenset({"score", "forward", "backward"})  # whose memory a step's rows decide


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a run has shown by running out of memory."""

    missing_bytes: int
    rows: StepRows | None = None  # of that step, or the longest before it; None: not known


def shown_by(run: GuardedRun) -> Shown:
    """Return what a guarded run of the record has shown."""
    assert run.failure is not None
    longest = None if run.lengths is None else round(run.lengths.longest)
    rows = shown_rows(run.refused_rows, run.failure.phase, longest)
    missing = missing_bytes(run.failure.numbers, run.peak_bytes, run.limit_bytes)
    return Shown(missing_bytes=missing, rows=rows)


def shown_rows(
    refused_rows: RefusedRows | None,
    phase: str | None,
    longest_completion: int | None,
) -> StepRows | None:
    """Return the rows that ran out of memory, or else the longest completion of earlier steps.

    A phase without a step (an evaluation) shows no rows of one.
    """
    if refused_rows is not None and phase in PHASES_WITH_ROWS:
        return StepRows(
            count=refused_rows.rows,
            tokens=refused_rows.tokens,
            completion=refused_rows.completion_tokens,
        )
    if longest_completion is None:
        return None
    return StepRows(completion=longest_completion)


def ways_after(
    request: ParsedRequest,
    candidate: Candidate,
    service: PredictionService,
    run: GuardedRun,
) -> tuple[WayToFit, ...]:
    """Return the changes that are predicted to fit after a guarded run of the candidate did not."""
    shown = shown_by(run)
    refuted = {candidate.id}
    for room in shown_rooms(request, candidate, service, shown):
        ways = ways_within(request, candidate, room.service, room.bytes, refuted)
        if ways:
            return ways
    return ()


@dataclass(frozen=True, kw_only=True)
class ShownRoom:
    """Room, and the service whose predictions are to be compared with it."""

    bytes: int
    service: PredictionService


def shown_rooms(
    request: ParsedRequest,
    candidate: Candidate,
    service: PredictionService,
    shown: Shown,
) -> Iterator[ShownRoom]:
    """Yield the rooms that a run of this candidate has shown, the safest first.

    1. The longest rows fit, if the prediction errs there as it did at the rows that were refused.
    2. The rows that were refused fit.
    3. The longest rows fit, if they were refused: where the log alone states lengths, or nothing.
    """
    job = request.job
    if shown.rows is not None and _are_rows_of_one_length(request, candidate):
        at_refusal = service.at_rows(shown.rows)
        room = _room_at(job, candidate, at_refusal, shown)
        yield ShownRoom(bytes=room, service=service)
        rows = shown.rows.of_one_length()
        yield ShownRoom(bytes=room, service=service.at_rows(rows))
        if shown.rows.tokens is not None:
            return
    room = _room_at(job, candidate, service, shown)
    yield ShownRoom(bytes=room, service=service)


def _room_at(
    job: Job,
    candidate: Candidate,
    service: PredictionService,
    shown: Shown,
) -> int:
    """Return the room if memory ran out at the rows of this service."""
    peak = service.predict(candidate).peak_memory_bytes
    room = room_bytes(round(peak.value), shown.missing_bytes)
    return min(job.memory_limit_bytes, room)


def _are_rows_of_one_length(request: ParsedRequest, candidate: Candidate) -> bool:
    """Return True if a micro-batch is a number of padded rows, not of tokens."""
    composition = request.trainer.compose(candidate, request.job.task)
    return not (composition.packs_rows or composition.token_budget)


def ways_within(
    request: ParsedRequest,
    candidate: Candidate,
    service: PredictionService,
    room: int,
    refuted: Iterable[str],
) -> tuple[WayToFit, ...]:
    """Return the changes with which the candidate is predicted to need no more than the room.

    A change that only narrows the interval (segments that expand) needs no less memory.
    """
    if room <= 0:
        return ()
    peak = service.predict(candidate).peak_memory_bytes
    spread = round(peak.high - peak.value)
    outside_bytes = max(0, request.job.memory_limit_bytes - room - spread)
    job = with_room(request.job, outside_bytes, request.trainer.fields())
    ways = ways_to_fit(request, candidate, service.of(job), refuted=refuted)
    return tuple(way for way in ways if way.prediction.peak_memory_bytes.value <= room)


def room_bytes(predicted_peak: int, missing: int) -> int:
    """Return the predicted peak that the next configuration may have at most."""
    return round((1 - RESERVE_SHARE) * predicted_peak) - missing


def missing_bytes(
    numbers: Numbers,
    peak_bytes: int | None,
    limit_bytes: int,
) -> int:
    """Return the bytes that were missing when memory was refused.

    A limit that is not known here (`ulimit`, memory of others) refused less than the known one:
    then the whole request was missing.
    """
    requested = numbers.get("asked_bytes")
    free = numbers.get("free_bytes")
    if requested is not None and free is not None and requested > free:
        return int(requested - free)
    used_bytes = peak_bytes or limit_bytes
    if requested is None:
        return round(UNKNOWN_REQUEST_SHARE * used_bytes)
    needed = used_bytes + int(requested)
    return needed - limit_bytes if needed > limit_bytes else int(requested)
