"""Room that a run has shown by running out of memory. With P the predicted peak of its
configuration, and M the bytes that were missing when it was refused, another one is predicted to
need at most

    room = 0.97 P - M

    A GPU of 40 GiB held 39 GiB, and 3 GiB were requested: M = 2 GiB. P was 36 GiB: the run needed
    6 GiB more than predicted (longer rows, another process), and so will the next one. Its
    predicted peak is at most 32.9 GiB.

Predictions of two similar configurations err alike, so their values are compared, not their bounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from autotune.core.answer import WayToFit
from autotune.core.space import Candidate
from autotune.failures.numbers import Numbers
from autotune.frameworks.shares_in_files import with_room
from autotune.prediction.guarded_runs import GuardedRun
from autotune.prediction.service import PredictionService
from autotune.request.job_builder import ParsedRequest
from autotune.search.advice import ways_to_fit

RESERVE_SHARE = 0.03  # of the predicted peak: rows may get longer than those that were refused
UNKNOWN_REQUEST_SHARE = 0.05  # of the peak, where no message says what was requested


def room_after(run: GuardedRun, predicted_peak: int) -> int:
    """Return the room that a guarded run has shown, for a configuration of this predicted peak."""
    assert run.failure is not None
    missing = missing_bytes(run.failure.numbers, run.peak_bytes, run.limit_bytes)
    return min(run.limit_bytes, room_bytes(predicted_peak, missing))


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
