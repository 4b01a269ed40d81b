"""The question's flags as Python's keyword arguments, and as words of a command line again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from os import PathLike
from typing import Any, TypeAlias, TypedDict

from autotune.asking.flags import Flags
from autotune.candidate import KnobValue
from autotune.errors import UnknownName
from autotune.own_script import Rewards
from autotune.question import ExecutorName, Mode, SamplerName
from autotune.secrets import without_password
from autotune.workload import Tuning, Weights

Name: TypeAlias = str | PathLike[str]
Values: TypeAlias = Mapping[str, KnobValue] | Sequence[str]
"""`{"use_vllm": False}`, or as it would be typed: `["use_vllm=false"]`."""

Choices: TypeAlias = Mapping[str, Sequence[KnobValue]] | Sequence[str]


class Common(TypedDict, total=False):
    """What every question takes, also one about a configuration that is not to be changed."""

    gpus: str
    method: str
    framework: str
    python: Name | None
    max_prompt_length: int | None
    search: Choices
    memory_limit: str | None
    weights: Weights
    seed: int
    space: Name | None


class Asking(Common, total=False):
    """The flags of `autotune run` and `autotune predict`, under the same names."""

    model: Name
    tuning: Tuning | None
    lora_rank: int | None
    max_completion_length: int | None
    typical_completion_length: int | None
    num_generations: int | None
    global_batch: int | None
    dataset: Name | None
    hold: Values
    config: Name | None
    script: Name | None
    rewards: Rewards
    arguments: Sequence[str]


class Searching(Asking, total=False):
    """What a search takes besides."""

    budget: str
    max_probes: int
    mode: Mode
    sampler: SamplerName
    storage: str | None
    study: str | None
    resume: bool
    fresh: bool
    executor: ExecutorName
    address: str | None
    slots: int | None
    metrics: Name | None
    speed_pattern: str | None
    learning: Sequence[str]
    out: Name


class Predicting(Asking, total=False):
    """What a prediction takes besides: what the one configuration in question has."""

    set: Values
    unknown: Choices


_PER_KNOB = ("hold", "set", "search", "unknown")
BEHIND_DASHES = "arguments"
"""What follows a bare `--`: a command line of the user's own, or what their script is given."""


def flags_of(given: Mapping[str, Any], known: Collection[str] | None = None) -> Flags:
    """Keyword arguments as Flags; one that is not known is refused with the nearest that are."""
    names = {field.name for field in dataclasses.fields(Flags)} if known is None else known
    for name in given:
        if name not in names:
            raise UnknownName("keyword", name, names)
    return Flags(**{name: _as_typed(name, value) for name, value in given.items()})


def typed(flags: Flags) -> list[str]:
    """What one would type for these flags: those that are not at their default. A storage's password is not among it."""
    words: list[str] = []
    for field in dataclasses.fields(Flags):
        value = getattr(flags, field.name)
        if value != field.default and field.name != BEHIND_DASHES:
            words += _words(f"--{field.name.replace('_', '-')}", value)
    return [*words, "--", *flags.arguments] if flags.arguments else words


def _words(flag: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag] if value else []
    values = value if isinstance(value, tuple) else (value,)
    return [word for one in values for word in (flag, without_password(str(one)))]


def _as_typed(name: str, value: Any) -> Any:
    if name in _PER_KNOB:
        return _assignments(value)
    if isinstance(value, PathLike):
        return str(value)
    return tuple(value) if isinstance(value, list) else value


def _assignments(value: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, Mapping):
        return tuple(value)
    return tuple(f"{name}={_choices(one)}" for name, one in value.items())


def _choices(value: Any) -> str:
    return ",".join(_text(one) for one in value) if isinstance(value, list | tuple | range) else _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
