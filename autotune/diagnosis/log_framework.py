"""Framework whose log is read, and remedies under its own names and flags."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache

from autotune import frameworks
from autotune.failures import Remedy
from autotune.frameworks.framework_facts import FrameworkFacts
from autotune.frameworks.launch_commands import LaunchKind, kind_of, launch_kinds

METHOD = "grpo"
"""Method that every framework has; the names in question are those of all its methods."""

_ENGINE = {
    "utilization": "vllm_gpu_memory_utilization", "max_model_length": "vllm_max_model_length",
    "tensor_parallel": "vllm_tensor_parallel_size", "sleep": "vllm_enable_sleep_mode", "max_num_seqs": "max_num_seqs",
}  # fmt: skip
"""Part of a framework's engine -> setting of the remedies."""


class LogFramework:
    """Collector of the framework that a log names. It receives every line; its size does not grow."""

    def __init__(self) -> None:
        self.name: str | None = None
        """None: TRL, whose names the tables of remedies have, or unknown."""

        self._is_former = False  # the log has a flag of an earlier release

    def feed(self, lowered: str) -> None:
        if self.name is None:
            self.name = next((kind.framework for kind in launch_kinds() if any(map(lowered.__contains__, kind.in_logs))), None)
        if self.name is not None and "--" in lowered and not self._is_former:
            self._is_former = any(f"--{former}" in lowered for former in kind_of(self.name).former_flags.values())

    def translated(self, remedies: Sequence[Remedy]) -> tuple[Remedy, ...]:
        """Return the remedies under this framework's names, without those that it has no setting for."""
        if self.name is None:
            return tuple(remedies)
        kind = kind_of(self.name)
        return tuple(one for one in (self._translated(remedy, kind) for remedy in remedies) if one is not None)

    def _translated(self, remedy: Remedy, kind: LaunchKind) -> Remedy | None:
        names, change = _names(kind.framework), dict[str, str]()
        for setting, way in remedy.change.items():
            own = names.get(remedy.elsewhere or setting, setting)
            if own is None:
                return None
            change[self._flag(own, kind) if own in _settings(kind.framework) else own] = kind.remedy_values.get(setting, way)
        reason = kind.remedy_reasons.get(next(iter(remedy.change)), remedy.why)
        return dataclasses.replace(remedy, change=change, why=remedy.why_elsewhere or reason)

    def _flag(self, name: str, kind: LaunchKind) -> str:
        if self._is_former:
            name = kind.former_flags.get(name, name)
        return name if kind.dotted else f"--{name}"


@cache
def _names(framework: str) -> Mapping[str, str | None]:
    """Return setting of the remedies -> the framework's own; None: it has none."""
    trainer = frameworks.trainer(framework, METHOD)
    facts = getattr(trainer, "facts", None)
    engine = facts.engine if isinstance(facts, FrameworkFacts) else {}
    parts = {_ENGINE[part]: name for part, name in engine.items() if part in _ENGINE and isinstance(name, str)}
    return {**trainer.canonical, **parts, **kind_of(framework).remedies}


@cache
def _settings(framework: str) -> frozenset[str]:
    return frozenset(frameworks.trainer(framework, METHOD).fields())
