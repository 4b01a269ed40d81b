"""The allocation that an event refers to, in any instance of its block.

Let f(i) be the allocation that an event of the group frees in instance i = 0 ... c, and a(i) the
one that some event of the group makes there. The longer model shows f(0) and f(1):

    f(0)     f(1)     then f(i) is
    a(0)     a(1)     a(i)        made in the same instance
    e        a(0)     a(i - 1)    made in the instance below; f(0) = e is the edge
    a(1)     e        a(i + 1)    made in the instance above; f(c) = e is the edge
    e        g(1)     g(i)        made outside the layers, once for each group; f(0) = e

Any other pair refuses the model.
"""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

from autotune.estimate.screening.pairing import Maker, Pairing
from autotune.estimate.screening.points import NotUniform

Address: TypeAlias = tuple[int, int, int, int]
"""An allocation of the full model, by the event that makes it: place, instance and offset as of a
`Maker`, and for what comes once for each group the number of the group, else 0."""


class References:
    """References in a model with `copies` further groups."""

    def __init__(self, pairing: Pairing, copies: int) -> None:
        self.copies = copies
        self._pairing = pairing
        self.maker_of = cache(pairing.maker_of)
        self.freed_by_layer = cache(self._freed_by_layer)
        self.in_instances = cache(self._in_instances)
        self._frees_of = cache(self._frees)

    def _freed_by_layer(self, place: int, offset: int) -> list[Address]:
        """Return f(0) ... f(c) for an event of the group."""
        lower, upper = self._pairing.allocations_at(place, offset)
        return self.in_instances(lower, upper)

    def _in_instances(self, lower: int, upper: int) -> list[Address]:
        """Return f(0) ... f(c), from f(0) and f(1): allocations of the longer model."""
        first, second = self.maker_of(lower), self.maker_of(upper)
        last = self.copies
        if upper in self._pairing.per_group:
            edge = (first.place, 0, first.offset, 0)
            groups = range(1, last + 1)
            return [edge, *((second.place, 0, second.offset, group) for group in groups)]
        if first.place == second.place and (first.instance, second.instance) == (0, 1):
            return [(first.place, i, first.offset, 0) for i in range(last + 1)]
        if second.place in self._pairing.group_blocks and second.instance == 0:
            return [self.edge(first), *((second.place, i, second.offset, 0) for i in range(last))]
        if first.instance == 1:
            above = range(1, last + 1)
            return [*((first.place, i, first.offset, 0) for i in above), self.edge(second)]
        raise NotUniform("a layer frees an allocation that its neighbours do not")

    def outside(self, number: int, group: int = 0) -> Address:
        """Return what an event outside the layers refers to, for one of the groups if not 0.

        `number`: what it refers to in the longer model.
        """
        maker = self.maker_of(number)
        if number in self._pairing.per_group:
            return maker.place, 0, maker.offset, group or self.copies
        if group and maker.place in self._pairing.group_blocks:
            return maker.place, group, maker.offset, 0
        return self.edge(maker)

    def edge(self, maker: Maker) -> Address:
        """Return an allocation of the lowest or of the highest instance, as in the longer model."""
        instance = self.copies if maker.instance else 0
        return maker.place, instance, maker.offset, 0

    def comes_per_group(self, block: int, event: int) -> bool:
        """Return True if the event, outside the layers, comes once for each further group.

        `block`: the longer model's, in which the event is.
        """
        number = abs(event) - 1
        if event > 0 or number in self._pairing.per_group:
            return number in self._pairing.per_group
        # It frees one of the group's allocations in instance 1: is that in instance 0 freed, too?
        maker = self.maker_of(number)
        if maker.instance != 1:
            return False
        lower, _ = self._pairing.allocations_at(maker.place, maker.offset)
        return lower in self._frees_of(block)

    def _frees(self, block: int) -> set[int]:
        """Return the allocations that a block of the longer model frees."""
        return {-event - 1 for event in self._pairing.longer.events_of(block) if event < 0}
