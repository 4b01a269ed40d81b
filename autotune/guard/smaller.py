"""The next configuration after memory ran out: it learns the same, and what the run has shown says
that it fits.

The advice is that of `autotune predict`: the fastest neutral change that fits into the room that
the run has shown (`search/shown_room.py`). Where nothing can be predicted, the remedies of the
failure table decide, in their order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autotune.core.answer import WayToFit
from autotune.core.errors import AutotuneError
from autotune.core.space import Candidate, Knobs, KnobValue
from autotune.diagnosis import Diagnosis
from autotune.diagnosis.next_change import Next, smaller_configurations
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH
from autotune.prediction.step_rows import StepRows
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
    """Evidence of the runs so far."""

    diagnosis: Diagnosis
    peak_bytes: int | None  # seen from outside
    # Ids of candidates that ended for lack of memory, or by a change of ours
    refuted: frozenset[str]
    may_change: frozenset[str]  # learning settings that the user allows to change
    rows: StepRows | None = None  # of the step that ran out, or the longest before it


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
    is_second = len(evidence.refuted) > 1  # the mildest change did not suffice
    try:
        choice = _predicted(request, candidate, evidence, keeps_batches)
    except AutotuneError:
        return _by_the_table(request, candidate, evidence, keeps_batches, strongest=is_second)
    if choice is not None:
        return choice
    # Nothing surely fits into what is left: try what needs least.
    return _by_the_table(request, candidate, evidence, keeps_batches, strongest=True)


def _predicted(
    request: ParsedRequest,
    candidate: Candidate,
    evidence: Evidence,
    keeps_batches: bool,
) -> Choice | None:
    from autotune.prediction.service import open_prediction_service
    from autotune.search.shown_room import Shown, missing_bytes, shown_rooms, ways_within

    limit = request.job.memory_limit_bytes
    missing = missing_bytes(evidence.diagnosis.numbers, evidence.peak_bytes, limit)
    shown = Shown(missing_bytes=missing, rows=evidence.rows)
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
        for room in shown_rooms(request, candidate, service, shown):
            ways = ways_within(
                request,
                candidate,
                room.service,
                room.bytes,
                evidence.refuted,
            )
            for way in sorted(ways, key=lambda way: way.learning):
                if _is_allowed(way.change, way.learning, evidence, keeps_batches):
                    return _predicted_choice(request, candidate, way, room.bytes)
    return None


def _predicted_choice(
    request: ParsedRequest,
    candidate: Candidate,
    way: WayToFit,
    room_bytes: int,
) -> Choice:
    return Choice(
        candidate=_changed(request, candidate, way.change),
        change=way.change,
        learning=way.learning,
        basis=BY_PREDICTION,
        speed_ratio=way.speed_ratio,
        needed_bytes=round(way.prediction.peak_memory_bytes.value),
        room_bytes=room_bytes,
    )


def _by_the_table(
    request: ParsedRequest,
    candidate: Candidate,
    evidence: Evidence,
    keeps_batches: bool,
    *,
    strongest: bool,
) -> Choice | None:
    possible = []
    for following in smaller_configurations(
        request.trainer, request.job.task, request.whole_space, candidate, evidence.diagnosis
    ):
        is_new = following.candidate.id not in evidence.refuted
        if is_new and _is_allowed(following.change, following.learning, evidence, keeps_batches):
            possible.append(following)
    if not possible:
        return None
    choice = min(possible, key=lambda following: following.learning)
    if strongest:
        choice = _strongest_of_its_kind(choice, possible)
    return Choice(
        candidate=choice.candidate,
        change=choice.change,
        learning=choice.learning,
        basis=BY_THE_TABLE,
    )


def _strongest_of_its_kind(choice: Next, possible: Sequence[Next]) -> Next:
    """Return the last change of the same settings: they are listed mildest first."""
    for following in possible:
        if following.change.keys() == choice.change.keys():
            choice = following
    return choice


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
