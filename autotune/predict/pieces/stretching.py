"""A long model's trace from a short one's and from that of a model one group of layers longer, allocation by allocation.

Every block of the long trace is one of the longer model's (`B`), where the group of its middle layers comes twice. What is
given back in a group's n-th repetition was made in that repetition, in the one before or behind it, or at the group's edge:
which, is told by how the two repetitions of `B` differ. What else grows with the model (its loading, its optimizer) has
events in `B` that the short one lacks: those come again with each repetition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from autotune.predict.pieces.aligning import aligned
from autotune.predict.pieces.blocks import Integers, NotUniform, Stretch
from autotune.predict.pieces.grown import grown, kinds
from autotune.predict.pieces.laid import Laid
from autotune.predict.pieces.repetitions import counted, falling, layer_of
from autotune.trace import Mark, Parameter, Trace, Usage

Repetition = tuple[int, int]
"""A block's place in the short trace, and the how-manieth time that it comes, by layers from below."""


@dataclass(frozen=True, kw_only=True)
class Long:
    """The long model's trace where the short ones were taken, and where its allocations come from."""

    trace: Trace
    origin: Integers
    """Of each allocation: the short trace's, whose size it has; -1 for those that are the same at every point."""

    more: Integers
    """Bytes above that size."""

    def sizes_of(self, short: Integers) -> Integers:
        """Of the long trace's allocations, from those of the short one."""
        return np.where(self.origin >= 0, short[self.origin], 0) + self.more


class Made(NamedTuple):
    """An allocation of the longer model: the block that makes it, and which of its events does so."""

    place: int
    instance: int
    offset: int


class _Related(NamedTuple):
    """What two repetitions refer to at one of their events."""

    to: str
    below: Made
    above: Made


def stretched(short: Trace, longer: Trace | None, stretch: Stretch) -> Long:
    """NotUniform where the longer model is not the short one with its middle layers repeated."""
    if longer is None or not stretch.copies:
        return Long(trace=short, origin=np.arange(len(short.sizes)), more=np.zeros(len(short.sizes), dtype=np.int64))
    return _Stretching(Laid(short), Laid(longer), stretch).long()


class _Stretching:
    """Writes the long trace."""

    def __init__(self, short: Laid, longer: Laid, stretch: Stretch) -> None:
        self.short, self.longer, self.copies = short, longer, stretch.copies
        once = list(replace(stretch, copies=1).order(short.keys))
        if len(once) != len(longer.spans):
            raise NotUniform(f"{len(longer.spans)} stretches where {len(once)} were expected")
        self.falling = falling(short.keys)
        self.group = {place for place, again in once if again}
        self.blocks = {self._repetition(*one, 1): number for number, one in enumerate(counted(once))}
        self.home = {number: repetition for repetition, number in self.blocks.items()}
        self.order = [self._repetition(*one, self.copies) for one in counted(list(stretch.order(short.keys)))]
        self.extra: set[int] = set()
        """The longer model's allocations that the short one lacks, outside of blocks that repeat."""
        self.twins: dict[int, tuple[int, int]] = {}
        """Of the longer model's others outside of blocks that repeat: the short one's, and what they are larger by."""
        for number, (place, _) in self.home.items():
            self._compare(number, place)
        self._frees: dict[int, set[int]] = {}
        self._relations: dict[tuple[int, int], _Related] = {}
        self.numbers: dict[tuple[Repetition, int, int], int] = {}
        """Of the long trace, by block, by the event that makes it, and by copy."""
        self.events: list[int] = []
        self.marks: list[Mark] = []
        self.uses: list[tuple[int, ...]] = []
        self.sources: list[tuple[int, int, int]] = []
        """Of each allocation: the longer model's, the short one's or -1, and how much larger it is."""

    def _repetition(self, place: int, time: int, copies: int) -> Repetition:
        return place, (copies - time if place in self.group and place in self.falling else time)

    # How the two traces differ.

    def _compare(self, number: int, place: int) -> None:
        ours, theirs = self.short.of(self.short.spans[place]), self.longer.of(self.longer.spans[number])
        one, other = self.short.spans[place].key, self.longer.spans[number].key
        if (one.phase, one.step, one.run) != (other.phase, other.step, other.run):
            raise NotUniform(f"{other.phase} where {one.phase} was expected")
        alike = len(ours) == len(theirs) and all(map(self._same, ours, theirs))
        if alike:
            self.twins.update({b - 1: (a - 1, 0) for a, b in zip(ours, theirs, strict=True) if a > 0})
        elif place in self.group or other.layer is not None:
            raise NotUniform(f"layer {other.layer} in phase {other.phase} is not like its neighbours")
        else:
            self._align([entry for entry in ours if entry > 0], [entry for entry in theirs if entry > 0])

    def _same(self, ours: int, theirs: int) -> bool:
        return (ours > 0) == (theirs > 0) and self.short.what(ours) == self.longer.what(theirs)

    def _align(self, ours: Sequence[int], theirs: Sequence[int]) -> None:
        """Which of these allocations are the short model's, and which there are more of."""
        places = aligned([self.short.what(entry) for entry in ours], [self.longer.what(entry) for entry in theirs])
        for a, place in zip(ours, places, strict=True):
            b = theirs[place]
            self.twins[b - 1] = (a - 1, self.longer.what(b)[0] - self.short.what(a)[0])
        self.extra.update({entry - 1 for entry in theirs} - {theirs[place] - 1 for place in places})

    # The long trace.

    def long(self) -> Long:
        for repetition in self.order:
            self._write(repetition)
        sizes = [self.longer.trace.sizes[b] + more for b, _, more in self.sources]
        trace = replace(
            self.longer.trace,
            layers=self.longer.trace.layers + (self.copies - 1) * (self.longer.trace.layers - self.short.trace.layers),
            sizes=tuple(sizes),
            parts=tuple(self.longer.trace.parts[b] for b, _, _ in self.sources),
            events=tuple(self.events),
            marks=tuple(self.marks),
            streams=self._streams(),
            returns=self._returns(),
            usage=self._usage(),
        )
        _require_sound(trace)
        origin = np.array([a for _, a, _ in self.sources], dtype=np.int64)
        base = np.array([self.short.trace.sizes[a] if a >= 0 else 0 for a in origin], dtype=np.int64)
        return Long(trace=trace, origin=origin, more=np.array(sizes, dtype=np.int64) - base)

    def _pattern(self, repetition: Repetition) -> int:
        """The longer model's block that this repetition is like."""
        place, instance = repetition
        return self.blocks[place, min(instance, 1)] if place in self.group else self.blocks[place, 0]

    def _write(self, repetition: Repetition) -> None:
        block = self._pattern(repetition)
        span = self.longer.spans[block]
        entries = list(enumerate(self.longer.of(span)))
        begins, starts = len(self.events), [0] * (len(entries) + 1)
        for extra, run in groupby(entries, lambda one: self._is_extra(repetition, one[1])):
            several = list(run)
            for copy in range(1, self.copies + 1) if extra else (0,):
                for offset, entry in several:
                    starts[offset] = starts[offset] if copy > 1 else len(self.events) - begins
                    self._event(repetition, offset, entry, copy)
        starts[-1] = len(self.events) - begins
        self._annotate(repetition, block, begins, starts)

    def _is_extra(self, repetition: Repetition, entry: int) -> bool:
        if repetition[0] in self.group:
            return False
        if entry > 0:
            return entry - 1 in self.extra
        made = self._made(-entry - 1)
        among = made.place in self.group and made.instance == 1
        return -entry - 1 in self.extra or (among and self._comes_with(repetition, entry))

    def _comes_with(self, repetition: Repetition, entry: int) -> bool:
        """Whether this block gives back one of each repetition, rather than the edge's alone."""
        block = self._pattern(repetition)
        made = self._made(-entry - 1)
        below = self._allocation(Made(made.place, 0, made.offset))
        return below is not None and -(below + 1) in self._freed(block)

    def _freed(self, block: int) -> set[int]:
        if block not in self._frees:
            self._frees[block] = {entry for entry in self.longer.of(self.longer.spans[block]) if entry < 0}
        return self._frees[block]

    def _event(self, repetition: Repetition, offset: int, entry: int, copy: int) -> None:
        if entry < 0:
            self.events.append(-(self._target(repetition, -entry - 1, copy, offset) + 1))
            return
        b = entry - 1
        a, more = self.twins.get(b, (-1, 0))
        self.numbers[repetition, offset, copy] = len(self.sources)
        self.sources.append((b, a, (self.copies - 1) * more))
        self.events.append(len(self.sources))

    # What an event of a repetition refers to.

    def _made(self, number: int) -> Made:
        block, offset = self.longer.where[number]
        return Made(*self.home[block], offset)

    def _allocation(self, made: Made) -> int | None:
        block = self.blocks.get((made.place, made.instance))
        if block is None:
            return None
        entry = self.longer.events[self.longer.spans[block].start + made.offset]
        return entry - 1 if entry > 0 else None

    def _target(self, repetition: Repetition, number: int, copy: int, offset: int | None) -> int:
        """The long trace's allocation; `offset` is that of the event that says so, in a block that repeats."""
        place, instance = repetition
        if place not in self.group:
            made = self._made(number)
            if number in self.extra:
                return self._long((made.place, 0), made.offset, copy or self.copies)
            if made.place in self.group:
                return self._long((made.place, copy or (self.copies if made.instance else 0)), made.offset)
            return self._long((made.place, 0), made.offset)
        assert offset is not None
        return self._between(instance, self._freed_at(place, 0, offset), self._freed_at(place, 1, offset))

    def _freed_at(self, place: int, instance: int, offset: int) -> int:
        return abs(self.longer.events[self.longer.spans[self.blocks[place, instance]].start + offset]) - 1

    def _between(self, instance: int, lower: int, upper: int) -> int:
        """What two repetitions refer to, told for any."""
        to, below, above = self._related(lower, upper)
        if to == "a copy":
            first = (below.place, 0), below.offset
            return self._long((above.place, 0), above.offset, instance) if instance else self._long(*first)
        if to == "its own":
            return self._long((below.place, instance), below.offset)
        if to == "the one before":
            return self._long((above.place, instance - 1), above.offset) if instance else self._plain(below)
        return self._long((below.place, instance + 1), below.offset) if instance < self.copies else self._plain(above)

    def _related(self, lower: int, upper: int) -> _Related:
        """Whose allocation a repetition refers to. The same two are asked about for every repetition."""
        if (lower, upper) not in self._relations:
            below, above = self._made(lower), self._made(upper)
            self._relations[lower, upper] = _Related(self._refers_to(below, above, is_extra=upper in self.extra), below, above)
        return self._relations[lower, upper]

    def _refers_to(self, below: Made, above: Made, *, is_extra: bool) -> str:
        inner = [made.place in self.group for made in (below, above)]
        if is_extra:
            return "a copy"
        if all(inner) and below.place == above.place and below.instance + 1 == above.instance:
            return "its own"
        if inner[1] and above.instance == 0:
            return "the one before"
        if inner[0] and below.instance == 1:
            return "the one behind"
        raise NotUniform("a layer gives back what its neighbours do not")

    def _plain(self, made: Made) -> int:
        instance = made.instance if made.place not in self.group else self.copies if made.instance else 0
        return self._long((made.place, instance), made.offset)

    def _long(self, repetition: Repetition, offset: int, copy: int = 0) -> int:
        found = self.numbers.get((repetition, offset, copy))
        if found is None:
            raise NotUniform("a layer gives back what was not made")
        return found

    # What else happens there.

    def _annotate(self, repetition: Repetition, block: int, begins: int, starts: Sequence[int]) -> None:
        place, instance = repetition
        for at, mark in self.longer.marks[block]:
            self.marks.append(replace(mark, event=begins + starts[at], layer=self._layer(mark.layer, place, instance, block)))
        for order, use in enumerate(self.longer.uses[block]):
            self.uses.append(self._use(repetition, block, order, use, begins + starts[use[0]]))

    def _layer(self, layer: int | None, place: int, instance: int, block: int) -> int | None:
        if layer is None:
            return None
        period = self.longer.trace.layers - self.short.trace.layers
        if place in self.group:
            return layer + (instance - min(instance, 1)) * period
        own = self.short.spans[place].key.layer
        return layer if own is None or own == layer else layer + (self.copies - 1) * period

    def _use(self, repetition: Repetition, block: int, order: int, use: tuple[int, ...], event: int) -> tuple[int, ...]:
        place, instance = repetition
        if place in self.group:
            lower, upper = (self._of_uses(self.longer, self.blocks[place, at], order, use) for at in (0, 1))
            times = instance
        else:
            lower, upper = self._of_uses(self.short, place, order, use), use
            times = self.copies
        which = lower[2] + times * (upper[2] - lower[2])
        if len(use) == 3:
            return event, use[1], which
        if use[3] < 0:
            return event, use[1], which, -1
        if place not in self.group:
            return event, use[1], which, self._target(repetition, use[3], 0, None)
        return event, use[1], which, self._between(instance, lower[3], upper[3])

    def _of_uses(self, laid: Laid, block: int, order: int, like: tuple[int, ...]) -> tuple[int, ...]:
        uses = laid.uses[block]
        if len(uses) <= order or uses[order][1] != like[1]:
            raise NotUniform("modules are used in another order")
        return uses[order]

    def _streams(self) -> dict[int, int]:
        streams = self.longer.trace.streams
        return {new: streams[b] for new, (b, _, _) in enumerate(self.sources) if b in streams} if streams else {}

    def _returns(self) -> dict[int, int]:
        """Before which allocation another stream has passed."""
        theirs = self.longer.trace.returns
        found: dict[int, int] = {}
        for (repetition, offset, copy), new in self.numbers.items() if theirs else ():
            b = self.sources[new][0]
            if b in theirs:
                found[new] = self._passed(repetition, offset, copy, theirs[b])
        return found

    def _passed(self, repetition: Repetition, offset: int, copy: int, before: int) -> int:
        if before >= len(self.longer.trace.sizes):
            return len(self.sources)
        place, instance = repetition
        if place not in self.group:
            return self._target(repetition, before, copy, None)
        made = [self._freed_at(place, at, offset) for at in (0, 1)]
        lower, upper = (self.longer.trace.returns.get(one, before) for one in made)
        return self._between(instance, lower, upper)

    def _usage(self) -> Usage | None:
        ours, theirs = self.short.trace.usage, self.longer.trace.usage
        if ours is None or theirs is None:
            return None
        inner = {layer_of(self.short.keys[place]) for place in self.group}
        period = self.longer.trace.layers - self.short.trace.layers
        parameters, modules = grown(ours, theirs, {layer + period for layer in inner if layer is not None}, self.copies - 1)
        return replace(theirs, parameters=self._numbered(parameters), modules=modules, uses=tuple(self.uses))

    def _numbered(self, parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
        """With the allocations that hold them: those of one kind are made in the order of the layers."""
        theirs = self.longer.trace.usage.parameters if self.longer.trace.usage else ()
        held = {one.number: kind for one, kind in zip(theirs, kinds(theirs), strict=True) if one.number is not None}
        made: dict[object, list[int]] = defaultdict(list)
        for new, (b, _, _) in enumerate(self.sources):
            if b in held:
                made[held[b]].append(new)
        found: list[Parameter] = []
        for one, kind in zip(parameters, kinds(parameters), strict=True):
            if one.number is not None and not made[kind]:
                raise NotUniform("parameters are made in another order")
            found.append(one if one.number is None else replace(one, number=made[kind].pop(0)))
        return tuple(found)


def _require_sound(trace: Trace) -> None:
    made: set[int] = set()
    gone: set[int] = set()
    for entry in trace.events:
        number = abs(entry) - 1
        if entry > 0:
            made.add(number)
        elif number not in made or number in gone:
            raise NotUniform("what is given back was not there")
        else:
            gone.add(number)
