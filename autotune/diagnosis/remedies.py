"""Remedies of a diagnosis: from the failure table, under the names of the framework whose log is
read; as values of one configuration; and with their predicted effect on memory and speed.

Nothing is measured here, and what can't be predicted stays None.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from autotune import frameworks
from autotune.core.errors import AutotuneError
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace
from autotune.diagnosis.diagnosis import Advice, Diagnosis
from autotune.failures.table import Remedy, remedies_for
from autotune.frameworks.framework_facts import FrameworkFacts
from autotune.frameworks.launch_commands import LaunchKind, kind_of, launch_kinds
from autotune.search.advice import BATCH_KNOBS

if TYPE_CHECKING:
    from autotune.prediction.service import PredictionService
    from autotune.request.job_builder import ParsedRequest

METHOD = (  # method that every framework has; the names in question are those of all its methods
    "grpo"
)
SOURCE = "trl"  # framework whose names the tables of remedies have

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
        self.name: str | None = (
            None  # None: TRL, whose names the tables of remedies have, or unknown
        )
        self._is_former = False  # the log has a flag of an earlier release
        self._methods: dict[str, str] = {}  # framework -> method, by the first words of one

    def feed(self, lowered: str) -> None:
        """Receive a block of lines; most have none of the words, so that it is looked at as a
        whole first.
        """
        unknown = [word for kind in launch_kinds() if self.name is None for word in kind.in_logs]
        for kind in launch_kinds():
            if kind.framework not in self._methods:
                unknown += [word for words in kind.methods_in_logs.values() for word in words]
        if any(map(lowered.__contains__, unknown)) or (
            self.name is not None and "--" in lowered and not self._is_former
        ):
            for line in lowered.split("\n"):
                self._feed_line(line)

    def _feed_line(self, lowered: str) -> None:
        if self.name is None:
            self.name = next(
                (
                    kind.framework
                    for kind in launch_kinds()
                    if any(map(lowered.__contains__, kind.in_logs))
                ),
                None,
            )
        if self.name is not None and "--" in lowered and not self._is_former:
            self._is_former = any(
                f"--{former}" in lowered for former in kind_of(self.name).former_flags.values()
            )
        for kind in launch_kinds():
            if kind.framework not in self._methods:
                named = (
                    method
                    for method, words in kind.methods_in_logs.items()
                    if any(map(lowered.__contains__, words))
                )
                self._methods.update(
                    (kind.framework, method) for method in itertools.islice(named, 1)
                )

    def translated(self, remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
        """Return the remedies under this framework's names, without those that it or its method
        has no setting for.
        """
        method = self._methods.get(self.name or SOURCE, METHOD)
        remedies = tuple(
            one for one in (_of_method(remedy, method) for remedy in remedies) if one is not None
        ) or tuple(remedies)
        if self.name is None:
            return remedies
        kind = kind_of(self.name)
        return tuple(
            one
            for one in (self._translated(remedy, kind) for remedy in remedies)
            if one is not None
        )

    def _translated(self, remedy: Remedy, kind: LaunchKind) -> Remedy | None:
        own = _names(kind.framework).get(remedy.elsewhere or remedy.setting, remedy.setting)
        if own is None:
            return None
        if own in _settings(kind.framework):  # its flag, as the log writes them
            own = kind.former_flags.get(own, own) if self._is_former else own
            own = own if kind.dotted else f"--{own}"
        why = remedy.why_elsewhere or kind.remedy_reasons.get(remedy.setting, remedy.why)
        return msgspec.structs.replace(
            remedy, setting=own, to=kind.remedy_values.get(remedy.setting, remedy.to), why=why
        )


def advice_for(diagnosis: Diagnosis, framework: LogFramework | None = None) -> tuple[Advice, ...]:
    """Return two or three changes under the framework's names, each bounded by a figure of the
    message where it has one; none where nothing is known, or nothing failed.
    """
    remedies = () if diagnosis.cause is None else remedies_for(diagnosis.cause, diagnosis.row)
    advice = []
    for remedy in remedies if framework is None else framework.translated(remedies):
        bound = diagnosis.numbers.get(remedy.bounded_by or "")
        limit = (
            ""
            if bound is None
            else f", to at most {bound if isinstance(bound, int) else format(bound, '.2f')}"
        )
        advice.append(Advice(change={remedy.setting: f"{remedy.to}{limit}"}, why=remedy.why))
    return tuple(advice)


def _of_method(remedy: Remedy, method: str) -> Remedy | None:
    """Return the remedy under the method's names, in those of TRL; None if the method lacks the
    setting.
    """
    past = kind_of(SOURCE).past_methods.get(method)
    if past is not None:
        own = past.get(remedy.setting, remedy.setting)
        return None if own is None else msgspec.structs.replace(remedy, setting=own)
    trainer, setting = frameworks.trainer(SOURCE, method), remedy.setting
    own = trainer.canonical.get(setting, setting)
    own = own if own in trainer.fields() else _ROW_LENGTH.get(setting, setting)
    if setting in frameworks.trainer(SOURCE, METHOD).fields() and own not in trainer.fields():
        return None
    return msgspec.structs.replace(remedy, setting=own)


@cache
def _names(framework: str) -> Mapping[str, str | None]:
    """Return setting of the remedies -> the framework's own; None: it has none."""
    if kind_of(framework).only_logs:
        return kind_of(framework).remedies
    trainer = frameworks.trainer(framework, METHOD)
    facts = getattr(trainer, "facts", None)
    engine = facts.engine if isinstance(facts, FrameworkFacts) else {}
    parts = {
        _ENGINE[part]: name
        for part, name in engine.items()
        if part in _ENGINE and isinstance(name, str)
    }
    return {**trainer.canonical, **parts, **kind_of(framework).remedies}


@cache
def _settings(framework: str) -> frozenset[str]:
    if kind_of(framework).only_logs:
        return frozenset(name for name in _names(framework).values() if name is not None)
    return frozenset(frameworks.trainer(framework, METHOD).fields())


Change: TypeAlias = Mapping[str, KnobValue]

_SWITCH: Mapping[str, bool] = {"on": True, "off": False}


def changes_of(advice: Advice, space: SearchSpace, candidate: Candidate) -> Iterator[Change]:
    """Yield the changes from the mildest to the strongest; none for a setting outside the space."""
    for setting, way in advice.change.items():
        direction, _, bound = way.partition(", to at most ")
        if setting == BATCH_KNOBS[0]:
            yield from _smaller_batches(candidate)
        elif knob := next(
            (one for one in (*space.knobs, *space.remedies) if one.name == setting), None
        ):
            now = candidate.settings.get(knob.name)
            yield from (
                {setting: value}
                for value in _values(knob, now, direction, int(bound) if bound else None)
            )


def _smaller_batches(candidate: Candidate) -> Iterator[Change]:
    """Yield smaller micro-batches with more accumulation steps, at the same global batch."""
    micro, steps = (candidate.settings.get(name) for name in BATCH_KNOBS[:2])
    if isinstance(micro, int) and isinstance(steps, int):
        halves = [
            size for size in range(micro - 1, 0, -1) if micro % size == 0 and size & (size - 1) == 0
        ]
        yield from (
            {BATCH_KNOBS[0]: size, BATCH_KNOBS[1]: steps * micro // size} for size in halves
        )


def _values(knob: Knob, now: KnobValue, direction: str, bound: int | None) -> list[KnobValue]:
    if direction in _SWITCH:
        return [_SWITCH[direction]] if now is not _SWITCH[direction] else []
    if direction not in ("raise", "lower"):
        return [choice for choice in knob.choices if str(choice) == direction and choice != now]
    if bound is not None:
        return [bound]
    numbers = sorted(
        choice
        for choice in knob.choices
        if isinstance(choice, int | float) and not isinstance(choice, bool)
    )
    if not isinstance(now, int | float):
        return []
    return (
        [n for n in numbers if n > now]
        if direction == "raise"
        else [n for n in reversed(numbers) if n < now]
    )


SECONDS = 120.0  # time limit for predictions; the remaining remedies get no figure


def with_effects(
    diagnosis: Diagnosis, request: ParsedRequest, candidate: Candidate, service: PredictionService
) -> Diagnosis:
    """Return the diagnosis with the prediction for the configuration that failed, and for each
    remedy that has one.
    """
    before, until = service.predict(candidate), time.monotonic() + SECONDS

    def after(change: Change) -> Prediction | None:
        knobs = request.whole_space.with_remedies({**candidate.knobs, **change})
        try:
            other = request.trainer.complete(knobs, request.job.task)
            if (
                other == candidate
                or request.trainer.why_illegal(other, request.job.task) is not None
            ):
                return None
            return service.predict(other)
        except AutotuneError:
            return None  # the other remedies may still be predicted

    def effect(advice: Advice) -> Mapping[str, Any] | None:
        """Return the effect of the mildest change in this direction that surely fits, or else of
        the strongest.
        """
        best: tuple[Change, Prediction] | None = None
        for change in changes_of(advice, request.whole_space, candidate):
            predicted = after(change)
            best = best if predicted is None else (change, predicted)
            if predicted is not None and predicted.fits:
                break
        if best is None:
            return None
        change, predicted = best
        learning = request.whole_space.is_learning(change, candidate.settings)
        speeds = before.tokens_per_second, predicted.tokens_per_second
        ratio = (
            None
            if learning or speeds[0] is None or speeds[1] is None
            else speeds[1].value / speeds[0].value
        )
        return {
            "change": dict(change),
            **_figures(predicted),
            "saved_bytes": round(
                before.peak_memory_bytes.value - predicted.peak_memory_bytes.value
            ),
            "speed_ratio": None if ratio is None else round(ratio, 3),
            "changes_what_is_learned": learning,
        }

    remedies = tuple(
        dataclasses.replace(advice, predicted=effect(advice) if time.monotonic() < until else None)
        for advice in diagnosis.remedies
    )
    return dataclasses.replace(diagnosis, remedies=remedies, configured=_figures(before))


def _figures(prediction: Prediction) -> dict[str, Any]:
    """Return the same fields as `predict --json`."""
    figures = {
        name: getattr(prediction, name)
        for name in ("peak_memory_bytes", "margin_bytes", "tokens_per_second")
    }
    return {
        "basis": prediction.basis,
        "fits": prediction.fits,
        **{
            name: one and {end: round(getattr(one, end)) for end in ("value", "low", "high")}
            for name, one in figures.items()
        },
    }
