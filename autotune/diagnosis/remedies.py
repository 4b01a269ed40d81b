"""Remedies of a diagnosis: from the failure table, under the names of the framework whose log is
read; as values of one configuration; and with their predicted effect on memory and speed.

Nothing is measured here, and what can't be predicted stays None.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import msgspec

from autotune import frameworks
from autotune.core.errors import AutotuneError
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace
from autotune.diagnosis.diagnosis import Advice, Diagnosis
from autotune.failures.table import Remedy, remedies_for, shared_remedy
from autotune.frameworks.base import ACCUMULATION, MICRO_BATCH
from autotune.frameworks.framework_facts import FrameworkFacts
from autotune.frameworks.launch_kinds import LaunchKind, kind_of, launch_kinds

if TYPE_CHECKING:
    from autotune.prediction.service import PredictionService
    from autotune.request.job_builder import ParsedRequest

# Method that every framework has; the names in question are those of all its methods.
DEFAULT_REMEDY_METHOD = "grpo"
MAX_REMEDIES = 3
TORCHS_MESSAGE = "cuda_out_of_memory"  # Row of the failures' table

# Framework whose names the tables of remedies have.
SOURCE = "trl"

_ROW_LENGTH = {"max_completion_length": "max_length"}
"""Setting of a generated row -> that of a given row, for methods that generate none."""

_ENGINE = {
    "utilization": "vllm_gpu_memory_utilization",
    "max_model_length": "vllm_max_model_length",
    "tensor_parallel": "vllm_tensor_parallel_size",
    "sleep": "vllm_enable_sleep_mode",
    "max_num_seqs": "max_num_seqs",
}
"""Part of a framework's engine -> setting of the remedies."""


class LogFramework:
    """Collector of the framework that a log names. It receives all lines in blocks; its size
    does not grow.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        """None: TRL, whose names the tables of remedies have, or unknown."""

        self._is_former = False  # the log has a flag of an earlier release
        self._methods: dict[str, str] = {}  # framework -> method, by the first words of one

    def feed(self, lowered: str) -> None:
        """Receive a block of lines. Most have none of the words: look at the block as a whole
        first.
        """
        is_relevant = self._may_have_former_flag(lowered) or self._has_marker(lowered)
        if is_relevant:
            for line in lowered.split("\n"):
                self._feed_line(line)

    def _may_have_former_flag(self, lowered: str) -> bool:
        return self.name is not None and not self._is_former and "--" in lowered

    def _has_marker(self, lowered: str) -> bool:
        """Return True if words of frameworks or methods are in it that are not known yet."""
        markers: list[str] = []
        for kind in launch_kinds():
            if self.name is None:
                markers += kind.in_logs
            if kind.framework not in self._methods:
                for markers_of_method in kind.methods_in_logs.values():
                    markers += markers_of_method
        return any(map(lowered.__contains__, markers))

    def _feed_line(self, lowered: str) -> None:
        if self.name is None:
            self.name = _framework_in(lowered)
        if self.name is not None and self._may_have_former_flag(lowered):
            former_flags = kind_of(self.name).former_flags.values()
            self._is_former = any(f"--{flag}" in lowered for flag in former_flags)
        for kind in launch_kinds():
            if kind.framework not in self._methods:
                method = _method_in(lowered, kind)
                if method is not None:
                    self._methods[kind.framework] = method

    def translated(self, remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
        """Return the remedies under this framework's names, without those that it or its method
        has no setting for.
        """
        method = self._methods.get(self.name or SOURCE, DEFAULT_REMEDY_METHOD)
        renamed = _present(_of_method(remedy, method) for remedy in remedies)
        if not renamed:
            renamed = tuple(remedies)
        if self.name is None:
            return renamed
        kind = kind_of(self.name)
        return _present(self._translated(remedy, kind) for remedy in renamed)

    def _translated(self, remedy: Remedy, kind: LaunchKind) -> Remedy | None:
        names = _names(kind.framework)
        name = remedy.elsewhere or remedy.setting
        setting = names.get(name, remedy.setting)
        if setting is None:
            return None
        if setting in _settings(kind.framework):  # its flag, as the log writes them
            if self._is_former:
                setting = kind.former_flags.get(setting, setting)
            if not kind.dotted:
                setting = f"--{setting}"
        direction = kind.remedy_values.get(remedy.setting, remedy.to)
        reason = remedy.why_elsewhere
        if not reason:
            reason = kind.remedy_reasons.get(remedy.setting, remedy.why)
        return msgspec.structs.replace(
            remedy,
            setting=setting,
            to=direction,
            why=reason,
        )


def _framework_in(lowered: str) -> str | None:
    for kind in launch_kinds():
        if any(map(lowered.__contains__, kind.in_logs)):
            return kind.framework
    return None


def _method_in(lowered: str, kind: LaunchKind) -> str | None:
    for method, markers in kind.methods_in_logs.items():
        if any(map(lowered.__contains__, markers)):
            return method
    return None


def _present(remedies: Iterable[Remedy | None]) -> tuple[Remedy, ...]:
    return tuple(remedy for remedy in remedies if remedy is not None)


def advice_for(diagnosis: Diagnosis, framework: LogFramework | None = None) -> tuple[Advice, ...]:
    """Return two or three changes under the framework's names, each bounded by a figure of the
    message where it has one; none where nothing is known, or nothing failed.
    """
    if diagnosis.cause is None:
        return ()
    remedies: Sequence[Remedy] = remedies_for(diagnosis.cause, diagnosis.row, diagnosis.phase)
    if _would_fit_joined(diagnosis):
        remedies = (shared_remedy("allocator"), *remedies)[:MAX_REMEDIES]
    if framework is not None:
        remedies = framework.translated(remedies)
    return tuple(_advice(remedy, diagnosis) for remedy in remedies)


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


def _of_method(remedy: Remedy, method: str) -> Remedy | None:
    """Return the remedy under the method's names, in those of TRL; None if the method lacks the
    setting.
    """
    former_names = kind_of(SOURCE).past_methods.get(method)
    if former_names is not None:
        former = former_names.get(remedy.setting, remedy.setting)
        if former is None:
            return None
        return msgspec.structs.replace(remedy, setting=former)
    trainer = frameworks.trainer(SOURCE, method)
    fields = trainer.fields()
    canonical = trainer.canonical
    setting = canonical.get(remedy.setting, remedy.setting)
    if setting not in fields:
        setting = _ROW_LENGTH.get(remedy.setting, remedy.setting)
    usual_trainer = frameworks.trainer(SOURCE, DEFAULT_REMEDY_METHOD)
    is_a_setting = remedy.setting in usual_trainer.fields()
    if is_a_setting and setting not in fields:
        return None
    return msgspec.structs.replace(remedy, setting=setting)


@cache
def _names(framework: str) -> Mapping[str, str | None]:
    """Return setting of the remedies -> the framework's own; None: it has none."""
    if kind_of(framework).only_logs:
        return kind_of(framework).remedies
    trainer = frameworks.trainer(framework, DEFAULT_REMEDY_METHOD)
    facts = getattr(trainer, "facts", None)
    engine_names = {}
    if isinstance(facts, FrameworkFacts):
        for part, name in facts.engine.items():
            if part in _ENGINE and isinstance(name, str):
                engine_names[_ENGINE[part]] = name
    return {**trainer.canonical, **engine_names, **kind_of(framework).remedies}


@cache
def _settings(framework: str) -> frozenset[str]:
    if kind_of(framework).only_logs:
        names = _names(framework).values()
        return frozenset(name for name in names if name is not None)
    trainer = frameworks.trainer(framework, DEFAULT_REMEDY_METHOD)
    return frozenset(trainer.fields())


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
    numbers = filter(_is_number, knob.choices)
    for choice in sorted(numbers):
        if choice > current:
            higher.append(choice)
        elif choice < current:
            lower.append(choice)
    if direction == "raise":
        return higher
    return lower[::-1]


def _is_number(value: KnobValue) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


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
