"""The trace of a model of full depth, from those of a short model and of one that is a group of
layers longer.

The full model's blocks are copies of the longer model's (`pairing`), in which the group occurs
twice, as instances 0 and 1. An event makes an allocation in every copy, or frees one that
`references` finds. Modules are numbered with the layers: m(i) = m(0) + i (m(1) - m(0)).

Outside the layers a block grows with the model: allocations that the longer model adds to the short
one's come again for each group, and sizes that differ grow by as much with each.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from autotune.core.trace import Mark, ModuleUse, Parameter, Trace
from autotune.estimate.screening.blocks import BlockedTrace, Use
from autotune.estimate.screening.growth import (
    ParameterKind,
    grown_inventory,
    grown_parameters,
    parameter_kinds,
)
from autotune.estimate.screening.pairing import NO_COUNTERPART, BlockCopy, Pairing, block_order
from autotune.estimate.screening.points import Integers, NotUniform
from autotune.estimate.screening.references import Address, References
from autotune.estimate.screening.repetition import LayerRepetition


@dataclass(frozen=True, kw_only=True)
class StretchedTrace:
    """The full model's trace at the point of the short ones, and the origin of its sizes.

    size in the full model = size of the short model's allocation `origin` + `growth`
    """

    trace: Trace
    origin: Integers  # by allocation; NO_COUNTERPART where the size is `growth` at every point
    growth: Integers  # bytes

    def sizes_from(self, short_sizes: Integers) -> Integers:
        """Return the full model's sizes, from those of the short model at any point."""
        return np.where(self.origin == NO_COUNTERPART, 0, short_sizes[self.origin]) + self.growth


def stretched(
    short: Trace,
    longer: Trace | None,
    repetition: LayerRepetition,
) -> StretchedTrace:
    """Return the full trace. NotUniform if the longer model does not repeat the middle layers."""
    if longer is None or not repetition.copies:
        return StretchedTrace(
            trace=short,
            origin=np.arange(len(short.sizes)),
            growth=np.zeros(len(short.sizes), dtype=np.int64),
        )
    pairing = Pairing(BlockedTrace(short), BlockedTrace(longer), repetition)
    return _Stretching(pairing, repetition).result()


class _Stretching:
    """Writer of one full trace."""

    def __init__(self, pairing: Pairing, repetition: LayerRepetition) -> None:
        self.pairing, self.repetition = pairing, repetition
        self.references = References(pairing, repetition.copies)
        self.short, self.longer = pairing.short, pairing.longer
        self.added_layers = self.longer.trace.layers - self.short.trace.layers  # by one group
        self.patterns: list[int] = []  # by allocation of the full trace: the longer model's
        self.numbers: dict[Address, int] = {}  # of the full trace's allocations
        self.events: list[int] = []
        self.marks: list[Mark] = []
        self.uses: list[Use] = []

    def result(self) -> StretchedTrace:
        # 1. Events, marks and uses, block by block.
        for copy in block_order(self.short.keys, self.repetition):
            self._write_block(copy)
        # 2. Sizes, and their origins in the short model.
        longer = self.longer.trace
        patterns = np.array(self.patterns, dtype=np.int64)
        more_groups = self.repetition.copies - 1
        growth = more_groups * np.array(self.pairing.growth, dtype=np.int64)
        sizes = (np.array(longer.sizes, dtype=np.int64) + growth)[patterns]
        origin = np.array(self.pairing.counterparts, dtype=np.int64)[patterns]
        short_sizes = np.array(self.short.trace.sizes, dtype=np.int64)
        base = np.where(origin == NO_COUNTERPART, 0, short_sizes[origin])
        # 3. The trace.
        first_copies: dict[int, int] = {}  # of the longer model's allocations
        for number, pattern in enumerate(self.patterns):
            first_copies.setdefault(pattern, number)
        trace = replace(
            longer,
            layers=longer.layers + more_groups * self.added_layers,
            sizes=tuple(sizes.tolist()),
            parts=tuple(longer.parts[pattern] for pattern in self.patterns),
            events=tuple(self.events),
            marks=tuple(self.marks),
            streams=self._streams(),
            returns=self._returns(),
            products=tuple(first_copies[n] for n in longer.products if n in first_copies),
            emptied=tuple(first_copies[n] for n in longer.emptied if n in first_copies),
            usage=self._usage(),
            inventory=grown_inventory(self.short.trace, longer, self.repetition),
        )
        _require_consistent(trace)
        return StretchedTrace(
            trace=trace,
            origin=origin,
            growth=sizes - base,
        )

    # 1. Events, marks and uses of a block.

    def _write_block(self, copy: BlockCopy) -> None:
        """Write a copy of the longer model's block."""
        block = self.pairing.pattern_of(copy)
        begin = len(self.events)
        pattern = self.longer.events_of(block)
        starts = [0] * len(pattern)  # where the event of each offset begins in this copy
        for offset, group in self._repeated_offsets(copy, block):
            if group <= 1:
                starts[offset] = len(self.events) - begin
            self._write_event(copy, offset, pattern[offset], group)
        starts.append(len(self.events) - begin)

        for offset, mark in self.longer.marks[block]:
            layer = self._layer_in(copy, mark.layer)
            self.marks.append(replace(mark, event=begin + starts[offset], layer=layer))
        for offset, *use in self._uses_in(copy, block):
            self.uses.append((begin + starts[offset], *use))

    def _repeated_offsets(self, copy: BlockCopy, block: int) -> Iterator[tuple[int, int]]:
        """Yield the offsets of a block's events in the order of the copy, each with its group: 0,
        or for events that come once for each group 1 ... c, a series of events after the other.
        """
        events = self.longer.events_of(block)
        if copy.place in self.pairing.group_blocks:
            yield from ((offset, 0) for offset in range(len(events)))
            return
        per_group = [self.references.comes_per_group(block, event) for event in events]
        for comes_again, series in groupby(range(len(events)), key=per_group.__getitem__):
            offsets = list(series)
            groups = range(1, self.repetition.copies + 1) if comes_again else (0,)
            for group in groups:
                yield from ((offset, group) for offset in offsets)

    def _write_event(
        self,
        copy: BlockCopy,
        offset: int,
        event: int,
        group: int,
    ) -> None:
        if event > 0:
            self.numbers[(*copy, offset, group)] = len(self.patterns)
            self.patterns.append(event - 1)
            self.events.append(len(self.patterns))
            return
        if copy.place in self.pairing.group_blocks:
            address = self.references.freed_by_layer(copy.place, offset)[copy.instance]
        else:
            address = self.references.outside(-event - 1, group)
        self.events.append(-1 - self._number(address))

    def _number(self, address: Address) -> int:
        number = self.numbers.get(address)
        if number is None:
            raise NotUniform("a layer frees an allocation that was not made")
        return number

    def _layer_in(self, copy: BlockCopy, layer: int | None) -> int | None:
        """Return the layer of a mark of the longer model's block, in this copy."""
        if layer is None:
            return None
        if copy.place in self.pairing.group_blocks:
            return layer + max(0, copy.instance - 1) * self.added_layers
        if self.short.keys[copy.place].layer in (None, layer):
            return layer
        return layer + (self.repetition.copies - 1) * self.added_layers

    def _uses_in(self, copy: BlockCopy, block: int) -> Iterator[Use]:
        """Yield the block's uses with modules and allocations of this copy, from two known ones."""
        uses = self.longer.uses[block]
        # 1. The two: both instances, or outside the layers both models.
        in_group = copy.place in self.pairing.group_blocks
        if in_group:
            lower_uses, upper_uses = (self.longer.uses[n] for n in self.pairing.twice(copy.place))
            steps = copy.instance
        else:
            lower_uses, upper_uses = self.short.uses[copy.place], uses
            steps = self.repetition.copies
        if min(len(lower_uses), len(upper_uses)) < len(uses):
            raise NotUniform("modules are used in another order")
        for use, lower, upper in zip(uses, lower_uses, upper_uses, strict=False):
            offset, kind, _, *allocation = use
            if not lower[1] == upper[1] == kind:
                raise NotUniform("modules are used in another order")
            # 2. The module or parameter.
            index = lower[2] + steps * (upper[2] - lower[2])
            # 3. The allocation of a gradient, if there is one.
            if allocation and allocation[0] >= 0:
                if in_group:
                    address = self.references.in_instances(lower[3], upper[3])[copy.instance]
                else:
                    address = self.references.outside(allocation[0])
                allocation = [self._number(address)]
            yield offset, kind, index, *allocation

    # 2. What the trace says of its allocations.

    def _streams(self) -> dict[int, int]:
        streams = self.longer.trace.streams
        return {
            number: streams[pattern]
            for number, pattern in enumerate(self.patterns)
            if pattern in streams
        }

    def _returns(self) -> dict[int, int]:
        """Return, for each allocation, the allocation before which another stream has passed."""
        returns: dict[int, int] = {}
        if self.longer.trace.returns:
            for address, number in self.numbers.items():
                before = self.longer.trace.returns.get(self.patterns[number])
                if before is not None:
                    returns[number] = self._passed_before(address, before)
        return returns

    def _passed_before(self, address: Address, before: int) -> int:
        """Return the full model's allocation for `before`, which is one of the longer model's."""
        place, instance, offset, group = address
        end = len(self.longer.trace.sizes)  # not within the trace
        if before >= end:
            return len(self.patterns)
        if place not in self.pairing.group_blocks:
            return self._number(self.references.outside(before, group))
        returns = self.longer.trace.returns
        lower, upper = (
            returns.get(number, before) for number in self.pairing.allocations_at(place, offset)
        )
        if max(lower, upper) >= end:
            raise NotUniform("another stream passes a layer's block in some instances alone")
        return self._number(self.references.in_instances(lower, upper)[instance])

    def _usage(self) -> ModuleUse | None:
        short, longer = self.short.trace.usage, self.longer.trace.usage
        if short is None or longer is None:
            return None
        # 1. Parameters and modules of all groups.
        layers = {self.short.keys[place].last_layer for place in self.pairing.group_blocks}
        second = {layer + self.added_layers for layer in layers if layer is not None}
        parameters, modules = grown_parameters(short, longer, second, self.repetition.copies - 1)
        # 2. Their allocations.
        placed = self._placed(longer.parameters, parameters)
        return replace(
            longer,
            parameters=tuple(placed),
            modules=modules,
            uses=tuple(self.uses),
        )

    def _placed(
        self, longer: Sequence[Parameter], parameters: Sequence[Parameter]
    ) -> Iterator[Parameter]:
        """Yield the parameters with their allocations: those of one kind are allocated in the order
        of the layers. `longer`: the longer model's.
        """
        kinds: dict[int, ParameterKind] = {}  # by the longer model's allocation
        for parameter, kind in zip(longer, parameter_kinds(longer), strict=True):
            if parameter.number is not None:
                kinds[parameter.number] = kind
        allocated: dict[ParameterKind, deque[int]] = defaultdict(deque)
        for number, pattern in enumerate(self.patterns):
            if pattern in kinds:
                allocated[kinds[pattern]].append(number)
        for parameter, kind in zip(parameters, parameter_kinds(parameters), strict=True):
            if parameter.number is None:
                yield parameter
                continue
            if not allocated[kind]:
                raise NotUniform("parameters are made in another order")
            yield replace(parameter, number=allocated[kind].popleft())


def _require_consistent(trace: Trace) -> None:
    live: set[int] = set()
    for event in trace.events:
        if event > 0:
            live.add(event)
        elif -event not in live:
            raise NotUniform("an event frees an allocation that is not live")
        else:
            live.remove(-event)
