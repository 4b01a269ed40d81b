"""The next configuration after memory ran out: it learns the same, and what the run has shown says
that it fits.

The advice is that of `autotune predict`: the fastest neutral change whose predicted peak surely
fits. The run corrects the prediction. With P the predicted peak of the configuration that failed, R
what it needed when it was refused, and L the limit:

    room = min(L, R) - max(0, R - P)

    L = 40 GiB, P = 36 GiB, R = 41 GiB: the run needed 5 GiB more than predicted (longer rows,
    another process). The next configuration is one that is predicted to need at most 35 GiB.

Where nothing can be predicted, the remedies of the failure table decide, in their order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

from autotune.core.errors import AutotuneError
from autotune.core.space import Candidate, Knobs, KnobValue
from autotune.diagnosis import Diagnosis
from autotune.diagnosis.next_change import smaller_configurations
from autotune.failures.numbers import Numbers
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH
from autotune.preflight.check import with_room
from autotune.request.job_builder import ParsedRequest
from autotune.search.change_kinds import BATCH_KNOBS

BY_PREDICTION = "predicted"
BY_THE_TABLE = "by the failure table"
OWN_VALUES = "the next of --values"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Configuration to go on with."""

    candidate: Candidate
    change: Knobs
    learning: bool  # changes what is learned; only with --may-change
    basis: str  # one of the three above
    speed_ratio: float | None = None
    needed_bytes: int | None = None  # predicted peak
    room_bytes: int | None = None  # that it must fit into


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the runs so far have shown."""

    diagnosis: Diagnosis
    peak_bytes: int | None  # seen from outside
    refuted: frozenset[
        str
    ]  # ids of candidates that ended for lack of memory, or by a change of ours
    may_change: frozenset[str]  # learning settings that the user allows to change


def next_choice(
    request: ParsedRequest,
    candidate: Candidate,
    evidence: Evidence,
    *,
    keeps_batches: bool = False,
) -> Choice | None:
    """Return the next configuration; None: nothing that learns the same is left.

    `keeps_batches`: another micro-batch would change the number of steps, and is not offered.
    """
    with contextlib.suppress(AutotuneError):
        choice = _predicted(request, candidate, evidence, keeps_batches)
        if choice is not None:
            return choice
    return _by_the_table(request, candidate, evidence, keeps_batches)


def _predicted(
    request: ParsedRequest,
    candidate: Candidate,
    evidence: Evidence,
    keeps_batches: bool,
) -> Choice | None:
    from autotune.prediction.service import open_prediction_service
    from autotune.search.advice import ways_to_fit

    # 1. The room that the run has shown, in predicted bytes.
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
        prediction = service.predict(candidate)
    limit = request.job.memory_limit_bytes
    predicted_peak = round(prediction.peak_memory_bytes.value)
    needed = needed_bytes(evidence.diagnosis.numbers, evidence.peak_bytes) or limit + 1
    room = room_bytes(limit, predicted_peak, needed)
    if room <= 0:
        return None

    # 2. The advice within that room.
    job = with_room(request.job, max(0, limit - room))
    with contextlib.closing(open_prediction_service(job, request.trainer)) as service:
        ways = ways_to_fit(request, candidate, service, refuted=evidence.refuted)
    for way in sorted(ways, key=lambda way: way.learning):
        if _is_allowed(way.change, way.learning, evidence, keeps_batches):
            changed = _changed(request, candidate, way.change)
            return Choice(
                candidate=changed,
                change=way.change,
                learning=way.learning,
                basis=BY_PREDICTION,
                speed_ratio=way.speed_ratio,
                needed_bytes=round(way.prediction.peak_memory_bytes.value),
                room_bytes=room,
            )
    return None


def room_bytes(
    limit: int,
    predicted_peak: int,
    needed: int,
) -> int:
    """Return the predicted peak that the next configuration may have at most."""
    return min(limit, needed) - max(0, needed - predicted_peak)


def needed_bytes(numbers: Numbers, peak_bytes: int | None) -> int | None:
    """Return what was needed when memory was refused: held then, and requested on top."""
    requested = numbers.get("asked_bytes")
    free = numbers.get("free_bytes")
    total = numbers.get("total_bytes")
    if requested is not None and free is not None and total is not None:
        return int(total - free + requested)
    if peak_bytes is None:
        return None
    return peak_bytes + int(requested or 1)


def _by_the_table(
    request: ParsedRequest,
    candidate: Candidate,
    evidence: Evidence,
    keeps_batches: bool,
) -> Choice | None:
    possible = []
    for following in smaller_configurations(
        request.trainer, request.job.task, request.whole_space, candidate, evidence.diagnosis
    ):
        is_new = following.candidate.id not in evidence.refuted
        if is_new and _is_allowed(following.change, following.learning, evidence, keeps_batches):
            possible.append(following)
    first = min(possible, key=lambda following: following.learning, default=None)
    if first is None:
        return None
    return Choice(
        candidate=first.candidate,
        change=first.change,
        learning=first.learning,
        basis=BY_THE_TABLE,
    )


def _is_allowed(
    change: Knobs,
    learning: bool,
    evidence: Evidence,
    keeps_batches: bool,
) -> bool:
    if keeps_batches and not change.keys().isdisjoint({MICRO_BATCH, ACCUMULATION}):
        return False
    return not learning or change.keys() <= evidence.may_change


def learned_settings(request: ParsedRequest, candidate: Candidate) -> dict[str, KnobValue]:
    """Return the settings that decide what is learned, with their values.

    Batches are counted in rows: of an optimizer step, and of a generation.
    """
    settings = candidate.settings
    learned: dict[str, KnobValue] = {}
    for knob in request.whole_space.learning_knobs(settings):
        if knob.name in settings and knob.name not in BATCH_KNOBS:
            learned[knob.name] = settings[knob.name]
    micro = settings.get(MICRO_BATCH)
    for name in BATCH_KNOBS:
        steps = settings.get(name)
        if name != MICRO_BATCH and isinstance(micro, int) and isinstance(steps, int):
            learned[f"{MICRO_BATCH} x {name}"] = micro * steps
    return learned


def same_learning(
    request: ParsedRequest,
    before: Candidate,
    after: Candidate,
    may_change: Collection[str],
) -> bool:
    """Return True if the global batch and every learning setting are equal, except allowed ones."""
    earlier = learned_settings(request, before)
    later = learned_settings(request, after)
    for name in earlier.keys() | later.keys():
        if name not in may_change and earlier.get(name) != later.get(name):
            return False
    return True


def _changed(
    request: ParsedRequest,
    candidate: Candidate,
    change: Knobs,
) -> Candidate:
    knobs = request.whole_space.with_remedies({**candidate.knobs, **change})
    return request.trainer.complete(knobs, request.job.task)
