"""The trace of a long model, from those of a short model and of one that is a group of layers
longer.

Each block of the long trace is one of the longer model's, in which the group of middle layers
occurs twice. An event in the n-th repetition of the group frees an allocation of that repetition,
of the one before or after, or of the group's edge: the difference between the two repetitions
decides which. Whatever else grows with the model (loading, the optimizer) has events in the longer
model that the short one lacks; they are repeated with each repetition.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import NamedTuple

import numpy as np

from autotune.core.trace import Mark, ModuleUse, Parameter, Trace
from autotune.estimate.screening.blocks import (
    BlockedTrace,
    Integers,
    LayerRepetition,
    NotUniform,
    falling,
    grown_inventory,
    grown_parameters,
    parameter_kinds,
)

BlockCopy = tuple[
    int, int
]  # a block's place in the short trace, and the number of its repetition, by layers from below


@dataclass(frozen=True, kw_only=True)
class StretchedTrace:
    """The long model's trace at the point of the short ones, and the origin of its allocations."""

    trace: Trace
    origin: (
        Integers  # the short trace's allocation of the same size; -1 for sizes equal at every point
    )
    more: Integers  # bytes above that size

    def sizes_of(self, short: Integers) -> Integers:
        """Return the long trace's sizes, from those of the short trace."""
        return np.where(self.origin >= 0, short[self.origin], 0) + self.more


class Made(NamedTuple):
    """An allocation of the longer model: its block, repetition, and the offset of its event."""

    place: int
    instance: int
    offset: int


def stretched(short: Trace, longer: Trace | None, repetition: LayerRepetition) -> StretchedTrace:
    """Return the long trace. NotUniform if the longer model does not repeat the middle layers."""
    if longer is None or not repetition.copies:
        return StretchedTrace(
            trace=short,
            origin=np.arange(len(short.sizes)),
            more=np.zeros(len(short.sizes), dtype=np.int64),
        )
    return _Stretching(BlockedTrace(short), BlockedTrace(longer), repetition).result()


class _Stretching:
    """Writer of one long trace."""

    def __init__(
        self, short: BlockedTrace, longer: BlockedTrace, repetition: LayerRepetition
    ) -> None:
        self.short, self.longer, self.repetition, self.copies = (
            short,
            longer,
            repetition,
            repetition.copies,
        )
        self.period = longer.trace.layers - short.trace.layers
        once = list(replace(repetition, copies=1).order(short.keys))
        if len(once) != len(longer.spans):
            raise NotUniform(f"{len(longer.spans)} blocks instead of {len(once)}")
        self.falling = falling(short.keys)
        self.group = {place for place, number in once if number}
        self.blocks = {self._copy_of(*one, 1): number for number, one in enumerate(once)}
        self.home = {number: copy for copy, number in self.blocks.items()}
        self.order = [self._copy_of(*one, self.copies) for one in repetition.order(short.keys)]
        self.extra: set[int] = (
            set()
        )  # the longer model's allocations that the short one lacks, outside of repeated blocks
        self.twins: dict[int, tuple[int, int]] = {}
        """Other allocations of the longer model: the short model's, and the additional bytes."""
        for number, (place, _) in self.home.items():
            self._compare(number, place)
        self._freed = cache(self._freed_entries)
        self._made = cache(self._find_made)  # the same for every repetition
        self.numbers: dict[tuple[BlockCopy, int, int], int] = {}
        """Allocations of the long trace by block, offset of the event that makes it, and copy."""
        self.events: list[int] = []
        self.marks: list[Mark] = []
        self.uses: list[tuple[int, ...]] = []
        self.sources: list[tuple[int, int, int]] = []
        """Sources of each allocation: the longer model's, the short one's or -1, more bytes."""

    def _copy_of(self, place: int, time: int, copies: int) -> BlockCopy:
        return place, (copies - time if place in self.group and place in self.falling else time)

    # 1. Difference between the two traces.

    def _compare(self, number: int, place: int) -> None:
        short, longer = self.short, self.longer
        ours, theirs = short.events_of(short.spans[place]), longer.events_of(longer.spans[number])
        one, other = short.keys[place], longer.keys[number]
        if one.stay != other.stay:
            raise NotUniform(f"{other.phase} where {one.phase} was expected")
        our_sizes, their_sizes = (
            list(map(short.size_and_part, ours)),
            list(map(longer.size_and_part, theirs)),
        )
        if our_sizes == their_sizes and all(
            (a > 0) == (b > 0) for a, b in zip(ours, theirs, strict=True)
        ):
            self.twins.update(
                {b - 1: (a - 1, 0) for a, b in zip(ours, theirs, strict=True) if a > 0}
            )
            return
        if place in self.group or other.layer is not None:
            raise NotUniform(
                f"layer {other.layer} in phase {other.phase} differs from its neighbours"
            )
        # Match allocations with the short model's; the others are extra.
        made = [(entry - 1, size) for entry, size in zip(ours, our_sizes, strict=True) if entry > 0]
        theirs_made = [
            (entry - 1, size) for entry, size in zip(theirs, their_sizes, strict=True) if entry > 0
        ]
        matches = [
            theirs_made[at]
            for at in aligned([size for _, size in made], [size for _, size in theirs_made])
        ]
        self.twins.update(
            {b: (a, more[0] - size[0]) for (a, size), (b, more) in zip(made, matches, strict=True)}
        )
        self.extra.update({b for b, _ in theirs_made} - {b for b, _ in matches})

    # 2. The long trace, block by block.

    def result(self) -> StretchedTrace:
        for copy in self.order:
            self._write(copy)
        longer = self.longer.trace
        sizes = [longer.sizes[b] + more for b, _, more in self.sources]
        trace = replace(
            longer,
            layers=longer.layers + (self.copies - 1) * self.period,
            sizes=tuple(sizes),
            parts=tuple(longer.parts[b] for b, _, _ in self.sources),
            events=tuple(self.events),
            marks=tuple(self.marks),
            streams={
                new: longer.streams[b]
                for new, (b, _, _) in enumerate(self.sources)
                if b in longer.streams
            },
            returns=self._returns(),
            products=self._first_copies(self.longer.trace.products),
            emptied=self._first_copies(self.longer.trace.emptied),
            usage=self._usage(),
            inventory=grown_inventory(self.short.trace, longer, self.repetition),
        )
        _require_consistent(trace)
        origin = np.array([a for _, a, _ in self.sources], dtype=np.int64)
        base = np.array(
            [self.short.trace.sizes[a] if a >= 0 else 0 for a in origin], dtype=np.int64
        )
        return StretchedTrace(
            trace=trace, origin=origin, more=np.array(sizes, dtype=np.int64) - base
        )

    def _pattern(self, copy: BlockCopy) -> int:
        """Return the longer model's block that this copy repeats."""
        place, instance = copy
        return (
            self.blocks[place, min(instance, 1)] if place in self.group else self.blocks[place, 0]
        )

    def _write(self, copy: BlockCopy) -> None:
        block = self._pattern(copy)
        entries = list(enumerate(self.longer.events_of(self.longer.spans[block])))
        begins, starts = len(self.events), [0] * (len(entries) + 1)
        for extra, run in groupby(entries, lambda one: self._is_extra(copy, one[1])):
            several = list(run)
            for number in range(1, self.copies + 1) if extra else (0,):
                for offset, entry in several:
                    starts[offset] = starts[offset] if number > 1 else len(self.events) - begins
                    self._event(copy, offset, entry, number)
        starts[-1] = len(self.events) - begins
        for at, mark in self.longer.marks[block]:
            self.marks.append(
                replace(mark, event=begins + starts[at], layer=self._layer(mark.layer, copy))
            )
        for order, use in enumerate(self.longer.uses[block]):
            self.uses.append(self._use(copy, order, use, begins + starts[use[0]]))

    def _is_extra(self, copy: BlockCopy, entry: int) -> bool:
        if copy[0] in self.group:
            return False
        if entry > 0 or -entry - 1 in self.extra:
            return abs(entry) - 1 in self.extra
        made = self._made(-entry - 1)
        if made.place not in self.group or made.instance != 1:
            return False
        # This block may free an allocation of each repetition.
        below = self.longer.events[
            self.longer.spans[self.blocks[made.place, 0]].start + made.offset
        ]
        return below > 0 and -below in self._freed(self._pattern(copy))

    def _freed_entries(self, block: int) -> set[int]:
        return {entry for entry in self.longer.events_of(self.longer.spans[block]) if entry < 0}

    def _event(self, copy: BlockCopy, offset: int, entry: int, number: int) -> None:
        if entry < 0:
            self.events.append(-(self._target(copy, -entry - 1, number, offset) + 1))
            return
        b = entry - 1
        a, more = self.twins.get(b, (-1, 0))
        self.numbers[copy, offset, number] = len(self.sources)
        self.sources.append((b, a, (self.copies - 1) * more))
        self.events.append(len(self.sources))

    # 3. Allocation to which an event of a copy refers.

    def _find_made(self, number: int) -> Made:
        block, offset = self.longer.origin[number]
        return Made(*self.home[block], offset)

    def _target(self, copy: BlockCopy, number: int, extra: int, offset: int | None) -> int:
        """Return the long trace's allocation; `offset`: place of the event, in a repeated block."""
        place, instance = copy
        if place in self.group:
            assert offset is not None
            return self._between(
                instance, self._freed_at(place, 0, offset), self._freed_at(place, 1, offset)
            )
        made = self._made(number)
        if number in self.extra:
            return self._long((made.place, 0), made.offset, extra or self.copies)
        if made.place in self.group:
            return self._long(
                (made.place, extra or (self.copies if made.instance else 0)), made.offset
            )
        return self._long((made.place, 0), made.offset)

    def _freed_at(self, place: int, instance: int, offset: int) -> int:
        return (
            abs(self.longer.events[self.longer.spans[self.blocks[place, instance]].start + offset])
            - 1
        )

    def _between(self, instance: int, lower: int, upper: int) -> int:
        """Return the target in any repetition, from the targets in the first two: a copy for
        each repetition, an allocation of the same repetition, of the one before, or of the one
        after.
        """
        below, above = self._made(lower), self._made(upper)
        if upper in self.extra:
            return (
                self._long((above.place, 0), above.offset, instance)
                if instance
                else self._long((below.place, 0), below.offset)
            )
        if (
            below.place in self.group
            and below.place == above.place
            and below.instance + 1 == above.instance
        ):
            return self._long((below.place, instance), below.offset)
        if above.place in self.group and above.instance == 0:
            return (
                self._long((above.place, instance - 1), above.offset)
                if instance
                else self._plain(below)
            )
        if below.place in self.group and below.instance == 1:
            return (
                self._long((below.place, instance + 1), below.offset)
                if instance < self.copies
                else self._plain(above)
            )
        raise NotUniform("a layer frees an allocation that its neighbours do not")

    def _plain(self, made: Made) -> int:
        instance = (
            made.instance if made.place not in self.group else self.copies if made.instance else 0
        )
        return self._long((made.place, instance), made.offset)

    def _long(self, copy: BlockCopy, offset: int, extra: int = 0) -> int:
        found = self.numbers.get((copy, offset, extra))
        if found is None:
            raise NotUniform("a layer frees an allocation that was not made")
        return found

    # 4. Marks, uses, streams and parameters.

    def _layer(self, layer: int | None, copy: BlockCopy) -> int | None:
        place, instance = copy
        if layer is None:
            return None
        if place in self.group:
            return layer + (instance - min(instance, 1)) * self.period
        own = self.short.keys[place].layer
        return layer if own is None or own == layer else layer + (self.copies - 1) * self.period

    def _use(
        self, copy: BlockCopy, order: int, use: tuple[int, ...], event: int
    ) -> tuple[int, ...]:
        """Return a use with the module and allocation of this copy, extrapolated from two."""
        place, instance = copy
        repeated = place in self.group
        if repeated:
            lower, upper = (
                self._use_of(self.longer, self.blocks[place, at], order, use) for at in (0, 1)
            )
        else:
            lower, upper = self._use_of(self.short, place, order, use), use
        module = lower[2] + (instance if repeated else self.copies) * (upper[2] - lower[2])
        if len(use) == 3 or use[3] < 0:
            return event, use[1], module, *use[3:]
        target = (
            self._between(instance, lower[3], upper[3])
            if repeated
            else self._target(copy, use[3], 0, None)
        )
        return event, use[1], module, target

    def _use_of(
        self, blocked: BlockedTrace, block: int, order: int, like: tuple[int, ...]
    ) -> tuple[int, ...]:
        uses = blocked.uses[block]
        if len(uses) <= order or uses[order][1] != like[1]:
            raise NotUniform("modules are used in another order")
        return uses[order]

    def _returns(self) -> dict[int, int]:
        """Return, for each allocation, the allocation before which another stream has passed."""
        theirs = self.longer.trace.returns
        found: dict[int, int] = {}
        for (copy, offset, extra), new in self.numbers.items() if theirs else ():
            b = self.sources[new][0]
            if b in theirs:
                found[new] = self._passed(copy, offset, extra, theirs[b])
        return found

    def _first_copies(self, numbers: Sequence[int]) -> tuple[int, ...]:
        first: dict[int, int] = {}
        for new, (b, _, _) in enumerate(self.sources):
            first.setdefault(b, new)
        return tuple(first[b] for b in numbers if b in first)

    def _passed(self, copy: BlockCopy, offset: int, extra: int, before: int) -> int:
        if before >= len(self.longer.trace.sizes):
            return len(self.sources)
        place, instance = copy
        if place not in self.group:
            return self._target(copy, before, extra, None)
        made = [self._freed_at(place, at, offset) for at in (0, 1)]
        lower, upper = (self.longer.trace.returns.get(one, before) for one in made)
        return self._between(instance, lower, upper)

    def _usage(self) -> ModuleUse | None:
        ours, theirs = self.short.trace.usage, self.longer.trace.usage
        if ours is None or theirs is None:
            return None
        inner = {self.short.keys[place].last_layer for place in self.group}
        layers = {layer + self.period for layer in inner if layer is not None}
        parameters, modules = grown_parameters(ours, theirs, layers, self.copies - 1)
        # Parameters of one kind are allocated in the order of the layers.
        held = {
            one.number: kind
            for one, kind in zip(theirs.parameters, parameter_kinds(theirs.parameters), strict=True)
            if one.number is not None
        }
        made: dict[object, list[int]] = defaultdict(list)
        for new, (b, _, _) in enumerate(self.sources):
            if b in held:
                made[held[b]].append(new)
        found: list[Parameter] = []
        for one, kind in zip(parameters, parameter_kinds(parameters), strict=True):
            if one.number is not None and not made[kind]:
                raise NotUniform("parameters are made in another order")
            found.append(one if one.number is None else replace(one, number=made[kind].pop(0)))
        return replace(theirs, parameters=tuple(found), modules=modules, uses=tuple(self.uses))


def _require_consistent(trace: Trace) -> None:
    live: set[int] = set()
    for entry in trace.events:
        if entry > 0:
            live.add(entry)
        elif -entry not in live:
            raise NotUniform("an event frees an allocation that is not live")
        else:
            live.remove(-entry)


# Alignment of a short model's allocations with those of a longer model.

SizeAndPart = tuple[int, int]

LARGER_COST = 1000  # cost of a match with a larger allocation, in runs: no trace has as many runs
NO_MATCH_COST = 10**9


def aligned(ours: Sequence[SizeAndPart], theirs: Sequence[SizeAndPart]) -> list[int]:
    """Return the place of each of `ours` in `theirs`, both in allocation order. NotUniform if one
    has no match.

    A match has an equal or larger size (a list over all parameters grows). The additional
    allocations form as few runs as possible.
    """
    more = len(theirs) - len(ours)
    if more < 0:
        raise NotUniform("the longer model lacks an allocation of the short one")
    # costs[i, d]: of matching ours[i] with theirs[i + d].
    one, other = (np.array(several, dtype=np.int64).reshape(-1, 2) for several in (ours, theirs))
    places = np.arange(len(ours))[:, None] + np.arange(more + 1)[None, :]
    larger = other[places, 0] - one[:, :1]
    by_size = np.where(larger == 0, 0, np.where(larger > 0, LARGER_COST, NO_MATCH_COST))
    costs = np.where(other[places, 1] == one[:, 1:], by_size, NO_MATCH_COST)
    # matched[i, d], added[i, d]: least cost of i of ours with d additions, by the kind of the last.
    matched, added = (
        np.full((len(ours) + 1, more + 1), NO_MATCH_COST, dtype=np.int64) for _ in range(2)
    )
    matched[0, 0] = 0
    for i in range(len(ours) + 1):
        if i:
            matched[i] = np.minimum(
                np.minimum(matched[i - 1], added[i - 1]) + costs[i - 1], NO_MATCH_COST
            )
        # Only the begin of a run costs: take the cheapest place where it may have begun.
        added[i, 1:] = np.minimum.accumulate(matched[i, :-1] + 1) if more else added[i, 1:]
    if min(matched[-1, more], added[-1, more]) >= NO_MATCH_COST:
        raise NotUniform("the longer model's allocations differ in kind")
    return _places(matched, added)


def _places(matched: Integers, added: Integers) -> list[int]:
    """Trace the cheapest path back from the end."""
    i, d = len(matched) - 1, matched.shape[1] - 1
    places: list[int] = []
    while i or d:
        if added[i, d] < matched[i, d]:  # a run of additions ends here: go back to its begin
            d = next(
                start for start in range(d - 1, -1, -1) if matched[i, start] + 1 == added[i, d]
            )
            if not i:
                break
        places.append(i - 1 + d)
        i -= 1
    return places[::-1]
