"""Framework that a log names, and remedies under its names and those of its method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from autotune import frameworks
from autotune.failures.remedy_table import Remedy
from autotune.frameworks.framework_facts import FrameworkFacts
from autotune.frameworks.launch_kinds import LaunchKind, kind_of, launch_kinds

if TYPE_CHECKING:
    pass


# Method that every framework has; the names in question are those of all its methods.
DEFAULT_REMEDY_METHOD = "grpo"

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
