"""The trace of a model of full depth, from those of a short model and of one that is a group of
layers longer.

The full model's blocks are copies of the longer model's (`pairing`), in which the group occurs
twice, as instances 0 and 1. What is new in instance i = 0 ... c of a block is the allocation that
an event refers to. Let f(i) be the allocation that a block's event frees in instance i, and a(i)
the one that some event of the group makes there. f(0) and f(1) are known:

    f(0)    f(1)      then f(i) is
    a(0)    a(1)      a(i)       of the same instance
    other   a(0)      a(i - 1)   of the instance below; f(0) is the edge
    a(1)    other     a(i + 1)   of the instance above; f(c) = other is the edge
    other   g         g(i)       made outside the layers for each group; f(0) is the edge

Any other pair refuses the model. Modules are numbered with the layers: m(i) = m(0) + i (m(1) -
m(0)).

Outside the layers a block grows with the model: allocations that the longer model adds to the short
one's come again for each group, and sizes that differ grow by as much with each.
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
from autotune.estimate.screening.blocks import BlockedTrace, Use
from autotune.estimate.screening.growth import grown_inventory, grown_parameters, parameter_kinds
from autotune.estimate.screening.pairing import (
    Address,
    BlockCopy,
    Counterpart,
    Pairing,
    block_order,
)
from autotune.estimate.screening.points import Integers, NotUniform
from autotune.estimate.screening.repetition import LayerRepetition


@dataclass(frozen=True, kw_only=True)
class StretchedTrace:
    """The full model's trace at the point of the short ones, and the origin of its sizes.

    size in the full model = size of the short model's allocation `origin` + `growth`
    """

    trace: Trace
    origin: Integers  # by allocation; -1 where the size is `growth` at every point
    growth: Integers  # bytes

    def sizes_from(self, short_sizes: Integers) -> Integers:
        """Return the full model's sizes, from those of the short model at any point."""
        return np.where(self.origin >= 0, short_sizes[self.origin], 0) + self.growth


def stretched(short: Trace, longer: Trace | None, repetition: LayerRepetition) -> StretchedTrace:
    """Return the full trace. NotUniform if the longer model does not repeat the middle layers."""
    if longer is None or not repetition.copies:
        return StretchedTrace(
            trace=short,
            origin=np.arange(len(short.sizes)),
            growth=np.zeros(len(short.sizes), dtype=np.int64),
        )
    pairing = Pairing(BlockedTrace(short), BlockedTrace(longer), repetition)
    return _Stretching(pairing, repetition).result()


class _Source(NamedTuple):
    """Source of one of the full model's allocations."""

    longer: int  # the longer model's allocation
    short: int  # the short model's; -1 without one
    growth: int  # bytes above the longer model's size


NO_COUNTERPART = Counterpart(-1, growth=0)


class _Stretching:
    """Writer of one full trace."""

    def __init__(self, pairing: Pairing, repetition: LayerRepetition) -> None:
        self.pairing, self.repetition = pairing, repetition
        self.short, self.longer = pairing.short, pairing.longer
        self.copies = repetition.copies
        self.added_layers = self.longer.trace.layers - self.short.trace.layers  # by one group
        self.sources: list[_Source] = []  # by allocation of the full trace
        self.numbers: dict[Address, int] = {}  # of the full trace's allocations
        self.events: list[int] = []
        self.marks: list[Mark] = []
        self.uses: list[Use] = []
        # The same for every instance.
        self._address_of = cache(pairing.address_of)
        self._frees_of = cache(self._frees)

    def result(self) -> StretchedTrace:
        # 1. Events, marks and uses, block by block.
        for copy in block_order(self.short.keys, self.repetition):
            self._write_block(copy)
        # 2. The trace.
        longer = self.longer.trace
        sizes = [longer.sizes[source.longer] + source.growth for source in self.sources]
        streams = {}
        for number, source in enumerate(self.sources):
            if source.longer in longer.streams:
                streams[number] = longer.streams[source.longer]
        trace = replace(
            longer,
            layers=longer.layers + (self.copies - 1) * self.added_layers,
            sizes=tuple(sizes),
            parts=tuple(longer.parts[source.longer] for source in self.sources),
            events=tuple(self.events),
            marks=tuple(self.marks),
            streams=streams,
            returns=self._returns(),
            products=self._first_copies(longer.products),
            emptied=self._first_copies(longer.emptied),
            usage=self._usage(),
            inventory=grown_inventory(self.short.trace, longer, self.repetition),
        )
        _require_consistent(trace)
        # 3. The sizes' origins.
        origin = np.array([source.short for source in self.sources], dtype=np.int64)
        short_sizes = np.array(self.short.trace.sizes, dtype=np.int64)
        base = np.where(origin >= 0, short_sizes[origin], 0)
        growth = np.array(sizes, dtype=np.int64) - base
        return StretchedTrace(trace=trace, origin=origin, growth=growth)

    # 1. Events of a block.

    def _write_block(self, copy: BlockCopy) -> None:
        block = self.pairing.pattern_of(copy)
        begin = len(self.events)
        events = list(enumerate(self.longer.events_of(block)))
        starts = [0] * (len(events) + 1)  # where the event of each offset begins in this copy

        def per_group(entry: tuple[int, int]) -> bool:
            return self._comes_per_group(copy, entry[1])

        for repeats, run in groupby(events, key=per_group):
            series = list(run)
            for group in range(1, self.copies + 1) if repeats else (0,):
                for offset, event in series:
                    if group <= 1:
                        starts[offset] = len(self.events) - begin
                    self._write_event(copy, offset, event, group)
        starts[-1] = len(self.events) - begin

        for offset, mark in self.longer.marks[block]:
            layer = self._layer_in(copy, mark.layer)
            self.marks.append(replace(mark, event=begin + starts[offset], layer=layer))
        for order, use in enumerate(self.longer.uses[block]):
            self.uses.append(self._use_in(copy, order, use, begin + starts[use[0]]))

    def _write_event(self, copy: BlockCopy, offset: int, event: int, group: int) -> None:
        """Write an event of the pattern block; `group`: 0, or whose it is outside the layers."""
        number = abs(event) - 1
        if event > 0:
            counterpart = self.pairing.counterparts.get(number, NO_COUNTERPART)
            growth = (self.copies - 1) * counterpart.growth
            self.numbers[Address(*copy, offset, group)] = len(self.sources)
            self.sources.append(_Source(number, counterpart.number, growth))
            self.events.append(len(self.sources))
        elif copy.place in self.pairing.group_blocks:
            self.events.append(-1 - self._freed_by_layer(copy, offset))
        else:
            self.events.append(-1 - self._freed_outside(number, group))

    def _comes_per_group(self, copy: BlockCopy, event: int) -> bool:
        """Return True for an event outside the layers that comes once for each further group."""
        if copy.place in self.pairing.group_blocks:
            return False
        number = abs(event) - 1
        if event > 0 or number in self.pairing.per_group:
            return number in self.pairing.per_group
        # Of an allocation of the group's layers: is that of each instance freed here?
        address = self._address_of(number)
        if address.place not in self.pairing.group_blocks or address.instance != 1:
            return False
        lower = self.pairing.blocks[BlockCopy(address.place, 0)]
        makes = self.longer.event_at(lower, address.offset)
        return makes > 0 and -makes in self._frees_of(self.pairing.pattern_of(copy))

    def _frees(self, block: int) -> set[int]:
        return {event for event in self.longer.events_of(block) if event < 0}

    # 2. The allocation that an event or a use refers to.

    def _freed_by_layer(self, copy: BlockCopy, offset: int) -> int:
        lower, upper = (self.pairing.allocation_at(copy.place, i, offset) for i in (0, 1))
        return self._in_instance(copy.instance, lower, upper)

    def _in_instance(self, instance: int, lower: int, upper: int) -> int:
        """Return f(instance), from f(0) and f(1) in the longer model: `lower` and `upper`."""
        first, second = self._address_of(lower), self._address_of(upper)
        if upper in self.pairing.per_group:
            if instance == 0:
                return self._number(Address(first.place, 0, first.offset))
            return self._number(Address(second.place, 0, second.offset, group=instance))
        if first.place == second.place and (first.instance, second.instance) == (0, 1):
            return self._number(Address(first.place, instance, first.offset))
        if second.place in self.pairing.group_blocks and second.instance == 0:
            if instance == 0:
                return self._at_edge(first)
            return self._number(Address(second.place, instance - 1, second.offset))
        if first.instance == 1:
            if instance == self.copies:
                return self._at_edge(second)
            return self._number(Address(first.place, instance + 1, first.offset))
        raise NotUniform("a layer frees an allocation that its neighbours do not")

    def _freed_outside(self, number: int, group: int = 0) -> int:
        """Return the allocation that an event outside the layers frees, for one of the groups."""
        address = self._address_of(number)
        if number in self.pairing.per_group:
            return self._number(Address(address.place, 0, address.offset, group or self.copies))
        if address.place in self.pairing.group_blocks and group:
            return self._number(Address(address.place, group, address.offset))
        return self._at_edge(address)

    def _at_edge(self, address: Address) -> int:
        """Return an allocation of the lowest or of the highest instance, as in the longer model."""
        instance = self.copies if address.instance else 0
        return self._number(Address(address.place, instance, address.offset))

    def _number(self, address: Address) -> int:
        number = self.numbers.get(address)
        if number is None:
            raise NotUniform("a layer frees an allocation that was not made")
        return number

    # 3. Marks, and uses of modules.

    def _layer_in(self, copy: BlockCopy, layer: int | None) -> int | None:
        """Return the layer of a mark of the pattern block, in this copy."""
        if layer is None:
            return None
        if copy.place in self.pairing.group_blocks:
            return layer + max(0, copy.instance - 1) * self.added_layers
        if self.short.keys[copy.place].layer in (None, layer):
            return layer
        return layer + (self.copies - 1) * self.added_layers

    def _use_in(self, copy: BlockCopy, order: int, use: Use, event: int) -> Use:
        """Return a use with the module and the allocation of this copy, from two known ones."""
        # 1. The module, from both instances, or outside the layers from both models.
        repeated = copy.place in self.pairing.group_blocks
        if repeated:
            blocks = [self.pairing.blocks[BlockCopy(copy.place, i)] for i in (0, 1)]
            lower, upper = (_use_at(self.longer, block, order, use) for block in blocks)
            steps = copy.instance
        else:
            lower, upper = _use_at(self.short, copy.place, order, use), use
            steps = self.copies
        _, kind, lower_module, *lower_allocation = lower
        _, _, upper_module, *upper_allocation = upper
        module = lower_module + steps * (upper_module - lower_module)
        # 2. The allocation of a gradient, if there is one.
        if len(use) == 3 or use[3] < 0:
            return event, kind, module, *use[3:]
        if repeated:
            number = self._in_instance(copy.instance, lower_allocation[0], upper_allocation[0])
        else:
            number = self._freed_outside(upper_allocation[0])
        return event, kind, module, number

    # 4. What the trace says of its allocations.

    def _returns(self) -> dict[int, int]:
        """Return, for each allocation, the allocation before which another stream has passed."""
        returns: dict[int, int] = {}
        if self.longer.trace.returns:
            for address, number in self.numbers.items():
                before = self.longer.trace.returns.get(self.sources[number].longer)
                if before is not None:
                    returns[number] = self._passed_before(address, before)
        return returns

    def _passed_before(self, address: Address, before: int) -> int:
        """Return the full model's allocation for `before`, which is one of the longer model's."""
        if before >= len(self.longer.trace.sizes):
            return len(self.sources)
        if address.place not in self.pairing.group_blocks:
            return self._freed_outside(before, address.group)
        lower, upper = (
            self.pairing.allocation_at(address.place, i, address.offset) for i in (0, 1)
        )
        returns = self.longer.trace.returns
        return self._in_instance(
            address.instance, returns.get(lower, before), returns.get(upper, before)
        )

    def _first_copies(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Return the first copies of the longer model's allocations."""
        first: dict[int, int] = {}
        for number, source in enumerate(self.sources):
            first.setdefault(source.longer, number)
        return tuple(first[number] for number in numbers if number in first)

    def _usage(self) -> ModuleUse | None:
        short, longer = self.short.trace.usage, self.longer.trace.usage
        if short is None or longer is None:
            return None
        # 1. Parameters and modules of all groups.
        layers = {self.short.keys[place].last_layer for place in self.pairing.group_blocks}
        second = {layer + self.added_layers for layer in layers if layer is not None}
        parameters, modules = grown_parameters(short, longer, second, self.copies - 1)
        # 2. Their allocations: parameters of one kind are allocated in the order of the layers.
        kinds: dict[int, object] = {}
        for parameter, kind in zip(
            longer.parameters, parameter_kinds(longer.parameters), strict=True
        ):
            if parameter.number is not None:
                kinds[parameter.number] = kind
        allocated: dict[object, list[int]] = defaultdict(list)
        for number, source in enumerate(self.sources):
            if source.longer in kinds:
                allocated[kinds[source.longer]].append(number)
        placed: list[Parameter] = []
        for parameter, kind in zip(parameters, parameter_kinds(parameters), strict=True):
            if parameter.number is not None:
                if not allocated[kind]:
                    raise NotUniform("parameters are made in another order")
                parameter = replace(parameter, number=allocated[kind].pop(0))
            placed.append(parameter)
        return replace(longer, parameters=tuple(placed), modules=modules, uses=tuple(self.uses))


def _use_at(blocked: BlockedTrace, block: int, order: int, like: Use) -> Use:
    """Return a block's use by its place in the order; it has to be of the same kind as `like`."""
    uses = blocked.uses[block]
    if len(uses) <= order or uses[order][1] != like[1]:
        raise NotUniform("modules are used in another order")
    return uses[order]


def _require_consistent(trace: Trace) -> None:
    live: set[int] = set()
    for event in trace.events:
        if event > 0:
            live.add(event)
        elif -event not in live:
            raise NotUniform("an event frees an allocation that is not live")
        else:
            live.remove(-event)
