"""Points, samples, and traces cut into blocks: the events of one layer in one pass, or those
between layers.

The middle layers of a model repeat each other, so the blocks of a long model are those of a short
one with the group of its middle layers repeated. This is checked, block by block, on two lengths.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from autotune.core.measurement import Phase
from autotune.core.trace import Inventory, Mark, ModuleUse, Parameter, Part, Trace

PARTS: tuple[Part, ...] = get_args(Part)

Floats = NDArray[np.float64]

Integers = NDArray[np.int64]


class NotUniform(Exception):
    """The model's layers do not repeat each other; the text names the difference."""


class Point(NamedTuple):
    """The settings in which candidates of one family differ."""

    micro_batch: int
    prompt: int
    completion: int
    micro_steps: int  # micro-batches per generation (without generation, per optimizer step)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A trace and its point."""

    point: Point
    trace: Trace


def rows_of(points: Sequence[Point]) -> Floats:
    return np.array(points, dtype=np.float64)


class BlockKey(NamedTuple):
    """Identity of a block, independent of model length and batch size."""

    phase: Phase
    step: int
    run: int  # number of the stay in this phase within the step
    layer: int | None  # the running layer; None between layers
    after: int | None  # the last layer that ran in this stay; None before the first
    occurrence: (
        int  # number among blocks with equal values above: passes in one stay repeat the layers
    )

    @property
    def stay(self) -> tuple[Phase, int, int]:
        return self.phase, self.step, self.run

    @property
    def last_layer(self) -> int | None:
        """The running layer, or the last one before."""
        return self.layer if self.layer is not None else self.after


@dataclass(frozen=True, kw_only=True)
class BlockSpan:
    """Range of a block in the ordered events of a trace."""

    key: BlockKey
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class TraceBlock:
    """Events of one block."""

    key: BlockKey
    numbers: Integers  # the allocation that each event makes or frees
    deltas: Integers  # bytes allocated (or, negative, freed) by each event
    parts: Integers  # index in PARTS of each event's allocation


def spans_of(trace: Trace) -> tuple[list[int], list[BlockSpan]]:
    """Return the events in a deterministic order, and all blocks with events. Neighbours between
    the same layers are one.
    """
    # 1. The blocks.
    runs: Counter[tuple[Phase, int]] = Counter()
    seen: Counter[tuple[object, ...]] = Counter()
    merged: list[tuple[tuple[Phase, int, int, int | None, int | None], int, int]] = []
    stay: tuple[Phase, int] | None = None
    after: int | None = None
    for mark, span in trace.stretches():
        if not len(span):
            continue
        if (mark.phase, mark.step) != stay:
            stay, after = (mark.phase, mark.step), None
            runs[stay] += 1
        after = mark.layer if mark.layer is not None else after
        key = (mark.phase, mark.step, runs[stay], mark.layer, after)
        if merged and merged[-1][0] == key and merged[-1][2] == span.start and mark.layer is None:
            merged[-1] = (key, merged[-1][1], span.stop)
        else:
            merged.append((key, span.start, span.stop))
    spans = []
    for key, start, stop in merged:
        spans.append(BlockSpan(key=BlockKey(*key, seen[key]), start=start, stop=stop))
        seen[key] += 1
    # 2. Frees between two allocations are simultaneous, in arbitrary order: sort them by number.
    events = np.array(trace.events, dtype=np.int64)
    uses = [use[0] for use in trace.usage.uses if use[0] < len(events)] if trace.usage else []
    begins = np.append(True, (events[1:] > 0) != (events[:-1] > 0))
    begins[np.array([*(span.start for span in spans), *uses], dtype=np.int64)] = True
    ordered: list[int] = events[np.lexsort((np.abs(events), np.cumsum(begins)))].tolist()
    return ordered, spans


def blocks_of(trace: Trace) -> tuple[TraceBlock, ...]:
    """Return all blocks in order."""
    ordered, spans = spans_of(trace)
    sizes, events = np.array(trace.sizes, dtype=np.int64), np.array(ordered, dtype=np.int64)
    names = np.array([PARTS.index(name) for name in trace.part_names], dtype=np.int64)
    numbers = np.abs(events) - 1
    deltas = np.sign(events) * sizes[numbers]
    parts = names[np.array(trace.parts, dtype=np.int64)][numbers]
    places = [(span.key, slice(span.start, span.stop)) for span in spans]
    return tuple(
        TraceBlock(key=key, numbers=numbers[at], deltas=deltas[at], parts=parts[at])
        for key, at in places
    )


class BlockedTrace:
    """A trace in blocks, with the marks and module uses of each block."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.events, self.spans = spans_of(trace)
        self.keys = [span.key for span in self.spans]
        self.origin = [(0, 0)] * len(
            trace.sizes
        )  # block and offset of the event that makes each allocation
        for number, span in enumerate(self.spans):
            for offset, entry in enumerate(self.events_of(span)):
                if entry > 0:
                    self.origin[entry - 1] = (number, offset)
        # Each block's marks with their offsets.
        self.marks: list[list[tuple[int, Mark]]] = [[] for _ in self.spans]
        block, last = 0, len(self.spans) - 1
        for mark in trace.marks:
            while block < last and mark.event >= self.spans[block].stop:
                block += 1
            self.marks[block].append((mark.event - self.spans[block].start, mark))
        # Each block's uses with offsets; ends belong to the block before, begins to the next.
        self.uses: list[list[tuple[int, ...]]] = [[] for _ in self.spans]
        block = 0
        for use in trace.usage.uses if trace.usage else ():
            ends = use[1] in (2, 4, 5)
            while block < last and use[0] >= self.spans[block].stop + ends:
                block += 1
            self.uses[block].append((use[0] - self.spans[block].start, *use[1:]))

    def events_of(self, span: BlockSpan) -> list[int]:
        return self.events[span.start : span.stop]

    def size_and_part(self, entry: int) -> tuple[int, int]:
        return self.trace.sizes[abs(entry) - 1], self.trace.parts[abs(entry) - 1]


# Growth by groups of layers: blocks, parameters, modules, inventory.


@dataclass(frozen=True, kw_only=True)
class LayerRepetition:
    """Repetition of layers `first` to `first + period - 1`, `copies` times."""

    layers: int  # layers of the short model
    first: int
    period: int
    copies: int

    def order(self, keys: Sequence[BlockKey]) -> Iterator[tuple[int, int]]:
        """Yield places in `keys` in the long model's order, each with the number of its
        repetition, from 0.
        """

        def repeated(group: Sequence[int]) -> Iterator[tuple[int, int]]:
            return ((one, number) for number in range(1, self.copies + 1) for one in group)

        group: list[int] = []
        for place, key in enumerate(keys):
            layer = key.last_layer
            inside = layer is not None and self.first <= layer < self.first + self.period
            if group and not (inside and keys[group[-1]].stay == key.stay):
                yield from repeated(group)
                group = []
            if inside:
                group.append(place)
            yield place, 0
        yield from repeated(group)


def falling(keys: Sequence[BlockKey]) -> set[int]:
    """Return the blocks in stays that run the layers from last to first (the backward pass)."""
    found: set[int] = set()
    for _, several in groupby(enumerate(keys), lambda one: one[1].stay):
        before: int | None = None
        latest: int | None = None
        for place, key in several:
            layer = key.last_layer
            if layer != latest and layer is not None:
                before, latest = latest, layer
            if layer is not None and before is not None and before > layer:
                found.add(place)
    return found


def parameter_kinds(parameters: Sequence[Parameter]) -> Iterator[tuple[int, int, bool]]:
    """Yield number within the layer, size, and True for parameters outside of layers."""
    seen: dict[int | None, int] = defaultdict(int)
    for one in parameters:
        yield seen[one.layer], one.size, one.layer is None
        seen[one.layer] += 1


def grown_parameters(
    ours: ModuleUse, theirs: ModuleUse, inner: Collection[int], more: int
) -> tuple[list[Parameter], tuple[tuple[int, ...], ...]]:
    """Return parameters and modules with `more` additional groups; `inner`: layers of one group."""
    each, modules = (
        len(theirs.parameters) - len(ours.parameters),
        len(theirs.modules) - len(ours.modules),
    )
    ends = 1 + max(
        (at for at, one in enumerate(theirs.parameters) if one.layer in inner), default=-1
    )
    held = [
        at
        for at, several in enumerate(theirs.modules)
        if any(ends - each <= one < ends for one in several)
    ]
    if (
        ends < each
        or not held
        or {one.layer for one in theirs.parameters[ends - each : ends]} != set(inner)
    ):
        raise NotUniform("parameters are in another order")

    def later(one: Parameter, groups: int) -> Parameter:
        return replace(one, layer=None if one.layer is None else one.layer + groups * len(inner))

    group = theirs.parameters[ends - each : ends]
    parameters = [
        *theirs.parameters[:ends],
        *(later(one, copy) for copy in range(1, more + 1) for one in group),
        *(later(one, more) for one in theirs.parameters[ends:]),
    ]
    last = held[-1] + 1
    repeated = theirs.modules[last - modules : last]
    return parameters, (
        *theirs.modules[:last],
        *(
            tuple(one + copy * each for one in several)
            for copy in range(1, more + 1)
            for several in repeated
        ),
        *(
            tuple(one if one < ends else one + more * each for one in several)
            for several in theirs.modules[last:]
        ),
    )


def grown_inventory(short: Trace, longer: Trace, repetition: LayerRepetition) -> Inventory:
    """Return the long model's inventory."""
    one, two, copies = short.inventory, longer.inventory, repetition.copies
    group = slice(repetition.first, repetition.first + repetition.period)

    def repeated(layers: tuple[int, ...]) -> tuple[int, ...]:
        return (*layers[: group.stop], *(layers[group] * copies), *layers[group.stop :])

    linear = (
        "parameters",
        "trainable_parameters",
        "weight_bytes",
        "trainable_bytes",
        "statistics_bytes",
    )
    grown = {
        name: getattr(one, name) + copies * (getattr(two, name) - getattr(one, name))
        for name in linear
    }
    return replace(
        one,
        **{name: int(value) for name, value in grown.items()},
        layer_bytes=repeated(one.layer_bytes),
        layer_trainable=repeated(one.layer_trainable),
        largest_parameter=max(one.largest_parameter, two.largest_parameter),
    )
