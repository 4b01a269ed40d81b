"""Search space: its knobs, their order of preference and effect, and the candidates that it
contains.

Spaces are data (search_spaces/*.yaml). Frameworks decide which combinations are legal. Candidates
with equal settings are equal, whichever knobs led to them: the id is a hash of the *settings*.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeAlias

from autotune.core.errors import BadInput, UnknownName

KnobValue: TypeAlias = bool | int | float | str | None  # scalar of YAML and JSON
Knobs: TypeAlias = Mapping[str, KnobValue]


def setting_text(value: object) -> str:
    """Return a setting as YAML."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def fingerprint(values: Mapping[str, object]) -> str:
    """Return a short hash of a mapping, independent of the key order."""
    canonical = json.dumps(values, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Complete point of the search space. A trainer builds it; a probe runner measures it."""

    knobs: Knobs  # knobs of the space, under the framework's names
    settings: Knobs  # all settings passed to the framework, derived ones included
    load: Knobs  # settings that force a reload when they change: model, precision, adapter, engine

    def __post_init__(self) -> None:
        for name in ("knobs", "settings", "load"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    @cached_property
    def id(self) -> str:
        return fingerprint(self.settings)

    @cached_property
    def load_key(self) -> str:
        return fingerprint(self.load)

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Candidate) and self.id == other.id


Effect = Literal["neutral", "learning"]
MemoryTrend = Literal["grows", "shrinks", "none", "unclear"]
Objective = Literal["preference", "throughput"]


@dataclass(frozen=True, kw_only=True)
class Knob:
    """Searchable setting."""

    name: str  # the framework's name of the setting
    choices: tuple[KnobValue, ...]  # neutral: ascending memory; learning: descending preference
    effect: Effect  # `neutral`: same gradient per step up to rounding; `learning`: another one
    says: str  # one-line description
    memory: MemoryTrend = "unclear"  # with rising value (False < True); `unclear`: never compared
    through: tuple[
        str, ...
    ] = ()  # settings through whose product it affects memory (accumulation: the generation batch)
    # Condition on other knobs; without it the knob is left out
    when: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    # Settings under which an otherwise neutral knob changes what is learned
    learning_when: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    # Values that a given setting must have for the knob to be neutral
    learning_unless: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    from_gpus: int = 0  # minimum number of GPUs for the knob to be offered

    def effect_under(self, settings: Mapping[str, object]) -> Effect:
        """Return the knob's effect under the held settings."""
        changed = any(settings.get(name) in values for name, values in self.learning_when.items())
        changed |= any(
            name in settings and settings[name] not in values
            for name, values in self.learning_unless.items()
        )
        return "learning" if changed else self.effect

    def applies(self, knobs: Mapping[str, object]) -> bool:
        return not self.when or all(knobs.get(name) in values for name, values in self.when.items())


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Knobs, and the order of preference among values that speed cannot compare."""

    name: str
    about: str
    method: str
    framework: str
    knobs: tuple[Knob, ...]
    objective: (
        Objective  # `preference`: learning knobs in declared order, then speed; `throughput`: speed
    )
    relax: tuple[str, ...] = ()  # learning knobs in the order of their relaxation when nothing fits
    remedies: tuple[Knob, ...] = ()  # settings outside the search that advice may offer
    assume: Mapping[str, KnobValue] = field(default_factory=dict)  # defaults: tuning, lora_rank

    def __getitem__(self, name: str) -> Knob:
        if name not in self._by_name:
            raise UnknownName(
                "knob", name, [knob.name for knob in self.knobs], listing="autotune show knobs"
            )
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> Mapping[str, Knob]:
        # Cached: tens of thousands of assignments look up each knob.
        return {knob.name: knob for knob in self.knobs}

    def on(self, gpus: int) -> SearchSpace:
        """Return the space without knobs and remedies that require more GPUs."""
        knobs, remedies = (
            tuple(knob for knob in part if knob.from_gpus <= gpus)
            for part in (self.knobs, self.remedies)
        )
        return replace(self, knobs=knobs, remedies=remedies)

    def with_choices(self, choices: Mapping[str, Sequence[KnobValue]]) -> SearchSpace:
        """Return the space with other choices for some knobs; a single choice holds the knob."""
        for name, values in choices.items():
            _ = self[name]
            if not values:
                raise BadInput(
                    f"Knob {name!r} was left without a value.",
                    way_out=f"Give at least one: --search {name}=V1,V2.",
                )
        knobs = tuple(
            replace(knob, choices=tuple(choices[knob.name])) if knob.name in choices else knob
            for knob in self.knobs
        )
        return replace(self, knobs=knobs)

    def assignments(self) -> Iterator[Knobs]:
        """Yield each combination of choices once, without knobs whose `when` fails."""
        seen: set[tuple[tuple[str, KnobValue], ...]] = set()
        for values in itertools.product(*(knob.choices for knob in self.knobs)):
            knobs = self.applicable(
                dict(zip((knob.name for knob in self.knobs), values, strict=True))
            )
            key = tuple(knobs.items())
            if key not in seen:
                seen.add(key)
                yield knobs

    def applicable(self, knobs: Knobs) -> Knobs:
        """Return `knobs` without those whose condition fails."""
        return {name: value for name, value in knobs.items() if self[name].applies(knobs)}

    def with_remedies(self, knobs: Knobs) -> Knobs:
        """Return `knobs`, remedies included, without those whose condition fails."""
        known = {knob.name: knob for knob in (*self.remedies, *self.knobs)}
        return {
            name: value
            for name, value in knobs.items()
            if name not in known or known[name].applies(knobs)
        }

    def is_learning(self, change: Mapping[str, object], settings: Mapping[str, object]) -> bool:
        """Return True if the change, remedies included, affects what is learned."""
        moved = [knob for knob in (*self.knobs, *self.remedies) if knob.name in change]
        return any(knob.effect_under(settings) == "learning" for knob in moved)

    def learning_knobs(self, settings: Mapping[str, object]) -> tuple[Knob, ...]:
        return tuple(knob for knob in self.knobs if knob.effect_under(settings) == "learning")
