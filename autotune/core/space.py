"""Search space: its knobs, their order of preference and effect, and the candidates that it
contains.

Spaces are data (search_spaces/*.yaml). Frameworks decide which combinations are legal. Candidates
with equal settings are equal, whichever knobs led to them: the id is a hash of the *settings*.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal, TypeAlias, TypeGuard

from autotune.core.errors import BadInput, UnknownName

KnobValue: TypeAlias = bool | int | float | str | None
"""Scalar of YAML and JSON."""

Knobs: TypeAlias = Mapping[str, KnobValue]
ValuesByName: TypeAlias = Mapping[str, tuple[KnobValue, ...]]


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for numbers; Python's truth values are none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_plain(value: object) -> TypeGuard[KnobValue]:
    """Return True for a single value, which a knob can have."""
    return value is None or isinstance(value, bool | int | float | str)


def setting_text(value: object) -> str:
    """Return a setting as YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def as_flags(change: Mapping[str, KnobValue], flag: str = "--set") -> str:
    """Return a change as flags of `predict`, or with `--hold` of `run`."""
    texts = []
    for name, value in change.items():
        texts.append(f"{flag} {name}={setting_text(value)}")
    return " ".join(texts)


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
            values = dict(getattr(self, name))
            object.__setattr__(self, name, MappingProxyType(values))

    @cached_property
    def id(self) -> str:
        return fingerprint(self.settings)

    @cached_property
    def load_key(self) -> str:
        return fingerprint(self.load)

    def __hash__(self) -> int:
        return hash(self.id)

    def __eq__(self, candidate: object) -> bool:
        return isinstance(candidate, Candidate) and self.id == candidate.id


Effect = Literal["neutral", "learning"]
"""Effect of a knob on the training. `neutral`: same gradient per step up to rounding; `learning`:
another one.
"""

MemoryTrend = Literal["grows", "shrinks", "none", "unclear"]
"""Memory of a step with a rising value of a knob (False < True). `unclear`: never compared."""

Objective = Literal["preference", "throughput"]
"""Order of the candidates that fit. `preference`: learning knobs in declared order, then speed;
`throughput`: speed.
"""


@dataclass(frozen=True, kw_only=True)
class Knob:
    """Searchable setting."""

    name: str  # the framework's name of the setting
    choices: tuple[KnobValue, ...]  # neutral: ascending memory; learning: descending preference
    effect: Effect
    says: str  # one-line description
    memory: MemoryTrend = "unclear"
    # Settings through whose product it affects memory (accumulation: the generation batch)
    through: tuple[str, ...] = ()
    # Condition on other knobs; without it the knob is left out
    when: ValuesByName = field(default_factory=dict)
    # Settings under which an otherwise neutral knob changes what is learned
    learning_when: ValuesByName = field(default_factory=dict)
    # Values that a given setting must have for the knob to be neutral
    learning_unless: ValuesByName = field(default_factory=dict)
    from_gpus: int = 0  # minimum number of GPUs for the knob to be offered

    def is_learning(self, settings: Mapping[str, object]) -> bool:
        """Return True if the knob changes what is learned under these settings."""
        return self.effect_under(settings) == "learning"

    def effect_under(self, settings: Mapping[str, object]) -> Effect:
        """Return the knob's effect under the held settings."""
        for name, values in self.learning_when.items():
            if settings.get(name) in values:
                return "learning"
        for name, values in self.learning_unless.items():
            if name in settings and settings[name] not in values:
                return "learning"
        return self.effect

    def applies(self, knobs: Mapping[str, object]) -> bool:
        """Return True if the condition on other knobs is met."""
        return all(knobs.get(name) in values for name, values in self.when.items())


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Knobs, and the order of preference among values that speed cannot compare."""

    name: str
    about: str
    method: str
    framework: str
    knobs: tuple[Knob, ...]
    objective: Objective
    relax: tuple[str, ...] = ()  # learning knobs in the order of their relaxation when nothing fits
    remedies: tuple[Knob, ...] = ()  # settings outside the search that advice may offer
    assume: Mapping[str, KnobValue] = field(default_factory=dict)  # defaults: tuning, lora_rank

    def __getitem__(self, name: str) -> Knob:
        if name not in self._by_name:
            raise UnknownName("knob", name, self._by_name, listing="autotune show knobs")
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> Mapping[str, Knob]:
        # Cached: tens of thousands of assignments look up each knob.
        return _by_name(self.knobs)

    @cached_property
    def _conditional(self) -> Sequence[Knob]:
        return [knob for knob in self.knobs if knob.when]

    def on(self, gpus: int) -> SearchSpace:
        """Return the space without knobs and remedies that require more GPUs."""

        def offered(knobs: Iterable[Knob]) -> tuple[Knob, ...]:
            return tuple(knob for knob in knobs if knob.from_gpus <= gpus)

        return replace(self, knobs=offered(self.knobs), remedies=offered(self.remedies))

    def with_choices(self, choices: Mapping[str, Sequence[KnobValue]]) -> SearchSpace:
        """Return the space with other choices for some knobs; a single choice holds the knob."""
        knobs = dict(self._by_name)
        for name, values in choices.items():
            knobs[name] = replace(self[name], choices=tuple(values))
            if not values:
                raise BadInput(
                    f"Knob {name!r} was left without a value.",
                    way_out=f"Give at least one: --search {name}=V1,V2.",
                )
        return replace(self, knobs=tuple(knobs.values()))

    def assignments(self) -> Iterator[Knobs]:
        """Yield each combination of choices once, without knobs whose `when` fails."""
        yielded: set[object] = set()
        choices = [knob.choices for knob in self.knobs]
        for values in itertools.product(*choices):
            assignment = dict(zip(self._by_name, values, strict=True))
            knobs = self.applicable(assignment)
            key = tuple(knobs.items())
            if key not in yielded:
                yielded.add(key)
                yield knobs

    def applicable(self, knobs: Knobs) -> Knobs:
        """Return `knobs` without those whose condition fails."""
        applicable = dict(knobs)
        for knob in self._conditional:
            if not knob.applies(knobs):
                applicable.pop(knob.name, None)
        return applicable

    def with_remedies(self, knobs: Knobs) -> Knobs:
        """Return `knobs`, remedies included, without those whose condition fails."""
        offered = _by_name((*self.remedies, *self.knobs))
        applicable: dict[str, KnobValue] = {}
        for name, value in knobs.items():
            if name not in offered or offered[name].applies(knobs):
                applicable[name] = value
        return applicable

    def is_learning(self, change: Mapping[str, object], settings: Mapping[str, object]) -> bool:
        """Return True if the change, remedies included, affects what is learned."""
        for knob in (*self.knobs, *self.remedies):
            if knob.name in change and knob.is_learning(settings):
                return True
        return False

    def learning_knobs(self, settings: Mapping[str, object]) -> tuple[Knob, ...]:
        return tuple(knob for knob in self.knobs if knob.is_learning(settings))


def _by_name(knobs: Iterable[Knob]) -> dict[str, Knob]:
    return {knob.name: knob for knob in knobs}
