"""Remedies of a diagnosis: from the failure table; as values of one configuration; and with their
predicted effect on memory and speed.

Nothing is measured here, and what can't be predicted stays None.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from autotune.core.errors import AutotuneError
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace, is_number
from autotune.diagnosis.diagnosis import Advice, Diagnosis
from autotune.diagnosis.gpu_neighbours import are_ranks_of_one_job
from autotune.diagnosis.log_framework import LogFramework
from autotune.failures.remedy_table import Remedy, remedies_for, shared_remedy
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH

if TYPE_CHECKING:
    from autotune.prediction.service import PredictionService
    from autotune.request.job_builder import ParsedRequest

MAX_REMEDIES = 3
TORCHS_MESSAGE = "cuda_out_of_memory"  # Row of the failures' table


def advice_for(diagnosis: Diagnosis, framework: LogFramework | None = None) -> tuple[Advice, ...]:
    """Return two or three changes under the framework's names, each bounded by a figure of the
    message where it has one; none where nothing is known, or nothing failed.
    """
    if diagnosis.cause is None:
        return ()
    remedies: Sequence[Remedy] = remedies_for(diagnosis.cause, diagnosis.row, diagnosis.phase)
    if _would_fit_joined(diagnosis):
        joined = dict.fromkeys((shared_remedy("allocator"), *remedies))  # each once
        remedies = tuple(joined)[:MAX_REMEDIES]
    if _ranks_share_a_gpu(diagnosis):
        remedies = (shared_remedy("own_gpu"),)
    if framework is not None:
        remedies = framework.translated(remedies)
    return tuple(_advice(remedy, diagnosis) for remedy in remedies)


def _ranks_share_a_gpu(diagnosis: Diagnosis) -> bool:
    if diagnosis.cause != "gpu_other_process":
        return False
    return are_ranks_of_one_job(diagnosis.evidence or "", diagnosis.rank)


def _would_fit_joined(diagnosis: Diagnosis) -> bool:
    """Return True if torch's cache held as much as was requested, in pieces that were too small."""
    idle_bytes = diagnosis.numbers.get("idle_bytes", 0)
    requested_bytes = diagnosis.numbers.get("asked_bytes")
    if requested_bytes is None or diagnosis.row != TORCHS_MESSAGE:
        return False
    return idle_bytes >= requested_bytes


def _advice(remedy: Remedy, diagnosis: Diagnosis) -> Advice:
    direction = remedy.to
    bound = diagnosis.numbers.get(remedy.bounded_by or "")
    if bound is not None:
        shown = format(bound, ".2f")
        if isinstance(bound, int):
            shown = str(bound)
        direction = f"{direction}, to at most {shown}"
    change = {remedy.setting: direction}
    return Advice(change=change, why=remedy.why)


RemedyChange: TypeAlias = Mapping[str, KnobValue]

_SWITCH: Mapping[str, bool] = {"on": True, "off": False}


def changes_of(
    advice: Advice,
    space: SearchSpace,
    candidate: Candidate,
) -> Iterator[RemedyChange]:
    """Yield the changes from the mildest to the strongest; none for a setting outside the space."""
    knobs = {knob.name: knob for knob in (*space.remedies, *space.knobs)}
    for setting, advised in advice.change.items():
        if setting == MICRO_BATCH:
            yield from _smaller_batches(candidate)
        elif setting in knobs:
            direction, _, bound = advised.partition(", to at most ")
            current = candidate.settings.get(setting)
            values = _values(knobs[setting], current, direction, bound)
            for value in values:
                yield {setting: value}


def _smaller_batches(candidate: Candidate) -> Iterator[RemedyChange]:
    """Yield smaller micro-batches with more accumulation steps, at the same global batch."""
    batch = candidate.settings.get(MICRO_BATCH)
    steps = candidate.settings.get(ACCUMULATION)
    if not isinstance(batch, int) or not isinstance(steps, int):
        return
    for size in range(batch - 1, 0, -1):
        is_power_of_two = size & (size - 1) == 0
        if is_power_of_two and batch % size == 0:
            accumulation = steps * batch // size
            yield {MICRO_BATCH: size, ACCUMULATION: accumulation}


def _values(
    knob: Knob,
    current: KnobValue,
    direction: str,
    bound: str,
) -> Sequence[KnobValue]:
    """Return the knob's values in this direction, the nearest to the current one first. `bound`: a
    whole number as text; empty: none.
    """
    if direction in _SWITCH:
        value = _SWITCH[direction]
        return [] if current is value else [value]
    if direction not in ("raise", "lower"):
        changed_choices = [choice for choice in knob.choices if choice != current]
        return [choice for choice in changed_choices if str(choice) == direction]
    if bound:
        return [int(bound)]
    if not isinstance(current, int | float):
        return []
    higher = []
    lower = []
    numbers = filter(is_number, knob.choices)
    for choice in sorted(numbers):
        if choice > current:
            higher.append(choice)
        elif choice < current:
            lower.append(choice)
    if direction == "raise":
        return higher
    return lower[::-1]


def with_effects(
    diagnosis: Diagnosis,
    request: ParsedRequest,
    candidate: Candidate,
    service: PredictionService,
) -> Diagnosis:
    """Return the diagnosis with the prediction for the configuration that failed, and for each
    remedy that has one.
    """
    failed = service.predict(candidate)
    remedies = []
    for advice in diagnosis.remedies:
        effect = _effect(advice, failed, request, candidate, service)
        with_effect = dataclasses.replace(advice, predicted=effect)
        remedies.append(with_effect)
    if diagnosis.is_memory:
        remedies = ranked(remedies)
    configured = _figures(failed)
    return dataclasses.replace(diagnosis, remedies=tuple(remedies), configured=configured)


def ranked(remedies: Iterable[Advice]) -> list[Advice]:
    """Return those that surely fit first, ranked like the advice of `predict`; the others keep
    their order.
    """
    from autotune.search.advice import cheapness

    fitting = []
    not_fitting = []
    for advice in remedies:
        effect = advice.predicted
        if effect is None or not effect["fits"]:
            not_fitting.append(advice)
            continue
        key = cheapness(effect["speed_ratio"], learning=effect["changes_what_is_learned"])
        fitting.append((key, advice))
    fitting.sort(key=operator.itemgetter(0))
    return [*(advice for _, advice in fitting), *not_fitting]


def _effect(
    advice: Advice,
    failed: Prediction,
    request: ParsedRequest,
    candidate: Candidate,
    service: PredictionService,
) -> Mapping[str, Any] | None:
    """Return the effect of the mildest change in this direction that surely fits, or else of the
    strongest.
    """
    change: RemedyChange | None = None
    predicted: Prediction | None = None
    for stronger in changes_of(advice, request.whole_space, candidate):
        prediction = _predicted_after(stronger, request, candidate, service)
        if prediction is not None:
            change = stronger
            predicted = prediction
            if prediction.fits:
                break
    if change is None or predicted is None:
        return None

    is_learning = request.whole_space.is_learning(change, candidate.settings)
    saved_bytes = failed.peak_memory_bytes.value - predicted.peak_memory_bytes.value
    speed_ratio = None if is_learning else _speed_ratio(failed, predicted)
    return {
        "change": dict(change),
        **_figures(predicted),
        "saved_bytes": round(saved_bytes),
        "speed_ratio": speed_ratio,
        "changes_what_is_learned": is_learning,
    }


def _predicted_after(
    change: RemedyChange,
    request: ParsedRequest,
    candidate: Candidate,
    service: PredictionService,
) -> Prediction | None:
    """Return the prediction of the changed candidate, None if it is the same or illegal."""
    task = request.job.task
    changed_knobs = {**candidate.knobs, **change}
    knobs = request.whole_space.with_remedies(changed_knobs)
    try:
        changed = request.trainer.complete(knobs, task)
        reason = request.trainer.why_illegal(changed, task)
        if changed == candidate or reason is not None:
            return None
        return service.predict(changed)
    except AutotuneError:
        return None  # the other remedies may still be predicted


def _speed_ratio(before: Prediction, after: Prediction) -> float | None:
    if before.tokens_per_second is None or after.tokens_per_second is None:
        return None
    ratio = after.tokens_per_second.value / before.tokens_per_second.value
    return round(ratio, 3)


def _figures(prediction: Prediction) -> dict[str, Any]:
    """Return the same fields as `predict --json`."""
    figures: dict[str, Any] = {"basis": prediction.basis, "fits": prediction.fits}
    for name in ("peak_memory_bytes", "margin_bytes", "tokens_per_second"):
        estimate = getattr(prediction, name)
        if estimate is not None:
            ends = ("value", "low", "high")
            estimate = {end: round(getattr(estimate, end)) for end in ends}
        figures[name] = estimate
    return figures
