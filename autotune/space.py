"""Knob and SearchSpace: what may move, in which order of preference, and what moving it means.

A space is data (search_spaces/*.yaml); this file gives it its types and its arithmetic. Which
combinations are legal is the trainer's to say.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from autotune.candidate import Knobs, KnobValue
from autotune.errors import BadInput, UnknownName

Effect = Literal["neutral", "learning"]
MemoryTrend = Literal["grows", "shrinks", "none", "unclear"]
Objective = Literal["preference", "throughput"]


@dataclass(frozen=True, kw_only=True)
class Knob:
    """One setting under its framework's own name."""

    name: str
    choices: tuple[KnobValue, ...]
    """Neutral knobs: from the least memory to the most. Learning knobs: from the most preferred to the least."""

    effect: Effect
    """`neutral`: moving it leaves the gradient of an optimizer step the same up to rounding; `learning`: it does not."""

    says: str
    """What it does, in a line."""

    memory: MemoryTrend = "unclear"
    """How the need for memory moves as the value goes up (False < True), all else equal: the one place that knows.
    `none`: not at all; `unclear`: either way, so values of it are never compared."""

    through: tuple[str, ...] = ()
    """The settings by whose product it acts on memory, where that is not its own value: accumulation acts through
    the generation batch, so where that is held it does nothing."""

    when: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    """The knob exists only while each of these other knobs has one of these values; else it is left out."""

    learning_when: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    """Settings under which an otherwise neutral knob changes what is learned."""

    learning_unless: Mapping[str, tuple[KnobValue, ...]] = field(default_factory=dict)
    """Settings that, where they are given at all, must have one of these values for the knob to be neutral."""

    from_gpus: int = 0
    """The knob is offered only where there are at least so many GPUs."""

    def effect_under(self, settings: Mapping[str, object]) -> Effect:
        """The knob's effect, given the settings that are held."""
        changed = any(settings.get(name) in values for name, values in self.learning_when.items())
        changed |= any(name in settings and settings[name] not in values for name, values in self.learning_unless.items())
        return "learning" if changed else self.effect

    def applies(self, knobs: Mapping[str, object]) -> bool:
        return not self.when or all(knobs.get(name) in values for name, values in self.when.items())


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """The knobs, and how to choose between values that are not comparable by speed."""

    name: str
    about: str
    method: str
    framework: str
    knobs: tuple[Knob, ...]
    objective: Objective
    """`preference`: learning knobs in their declared order, speed only between equals. `throughput`: speed alone."""

    relax: tuple[str, ...] = ()
    """Learning knobs in the order in which they give way when nothing fits: the first is given up first."""

    remedies: tuple[Knob, ...] = ()
    """Settings that are never searched, and that advice may offer where nothing of the space helps."""

    assume: Mapping[str, KnobValue] = field(default_factory=dict)
    """What the bare command takes for granted: tuning, lora_rank, global_batch and the like."""

    def __getitem__(self, name: str) -> Knob:
        if name not in self._by_name:
            raise UnknownName("knob", name, [knob.name for knob in self.knobs], listing="autotune show knobs")
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> Mapping[str, Knob]:
        """Spaces have tens of thousands of assignments, and each looks up every knob."""
        return {knob.name: knob for knob in self.knobs}

    def on(self, gpus: int) -> SearchSpace:
        """The same space without the knobs and remedies that so many GPUs have no use for."""
        offered = tuple(knob for knob in self.knobs if knob.from_gpus <= gpus)
        return replace(self, knobs=offered, remedies=tuple(knob for knob in self.remedies if knob.from_gpus <= gpus))

    def with_choices(self, choices: Mapping[str, Sequence[KnobValue]]) -> SearchSpace:
        """The same space with other choices for some knobs; one choice holds the knob."""
        for name, values in choices.items():
            _ = self[name]
            if not values:
                raise BadInput(f"Knob {name!r} was left without a value.", way_out=f"Give at least one: --search {name}=V1,V2.")
        knobs = tuple(replace(knob, choices=tuple(choices[knob.name])) if knob.name in choices else knob for knob in self.knobs)
        return replace(self, knobs=knobs)

    def assignments(self) -> Iterator[Knobs]:
        """Every combination of choices, each once; knobs whose `when` fails are left out of it."""
        seen: set[tuple[tuple[str, KnobValue], ...]] = set()
        for values in itertools.product(*(knob.choices for knob in self.knobs)):
            knobs = self.applicable(dict(zip((knob.name for knob in self.knobs), values, strict=True)))
            key = tuple(knobs.items())
            if key not in seen:
                seen.add(key)
                yield knobs

    def applicable(self, knobs: Knobs) -> Knobs:
        """`knobs` without those whose condition does not hold."""
        return {name: value for name, value in knobs.items() if self[name].applies(knobs)}

    def with_remedies(self, knobs: Knobs) -> Knobs:
        """`knobs`, some of which may be remedies, without those whose condition does not hold."""
        known = {knob.name: knob for knob in (*self.remedies, *self.knobs)}
        return {name: value for name, value in knobs.items() if name not in known or known[name].applies(knobs)}

    def is_learning(self, change: Mapping[str, object], settings: Mapping[str, object]) -> bool:
        """Whether moving these, remedies among them, changes what is learned."""
        moved = [knob for knob in (*self.knobs, *self.remedies) if knob.name in change]
        return any(knob.effect_under(settings) == "learning" for knob in moved)

    def learning_knobs(self, settings: Mapping[str, object]) -> tuple[Knob, ...]:
        return tuple(knob for knob in self.knobs if knob.effect_under(settings) == "learning")
