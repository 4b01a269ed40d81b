"""Pairing of a short model's trace with that of a longer one, in which the group of middle layers
occurs twice.

Each block of the longer trace repeats one of the short trace: a `BlockCopy` names that block and
the instance of the group. The pairing finds each allocation's counterpart in the short trace, and
refuses layers that differ from their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from autotune.estimate.screening.alignment import aligned
from autotune.estimate.screening.blocks import BlockedTrace, BlockKey
from autotune.estimate.screening.points import NotUniform
from autotune.estimate.screening.repetition import LayerRepetition

NO_COUNTERPART = -1  # no counterpart


class BlockCopy(NamedTuple):
    """A block of a model with further groups of layers."""

    place: int  # number of the short trace's block that it repeats
    instance: int  # of the group, counted from the lowest layers; 0: also blocks of other layers


class Maker(NamedTuple):
    """The event of the longer model that makes an allocation."""

    place: int  # its block, as of a `BlockCopy`
    instance: int
    offset: int  # in the block


def block_order(keys: Sequence[BlockKey], repetition: LayerRepetition) -> list[BlockCopy]:
    """Return the blocks of the model with `copies` more groups, in the order of its events.

    Each series of blocks of the group in one stay is repeated as a whole. A backward pass comes to
    the highest instance first.
    """
    descending = descending_blocks(keys)

    def series(place: int) -> tuple[object, bool]:
        return keys[place].stay, repetition.contains(keys[place].last_layer)

    order = []
    for (_, in_group), group in groupby(range(len(keys)), key=series):
        places = list(group)
        turns = 1 + repetition.copies if in_group else 1
        for turn in range(turns):
            for place in places:
                instance = turns - 1 - turn if place in descending else turn
                order.append(BlockCopy(place, instance))
    return order


def descending_blocks(keys: Sequence[BlockKey]) -> set[int]:
    """Return the blocks in stays that run the layers from last to first (the backward pass)."""
    blocks: set[int] = set()
    for _, places in groupby(range(len(keys)), key=lambda place: keys[place].stay):
        previous: int | None = None
        current: int | None = None
        for place in places:
            layer = keys[place].last_layer
            if layer is None:
                continue
            if layer != current:
                previous, current = current, layer
            if previous is not None and previous > layer:
                blocks.add(place)
    return blocks


class Pairing:
    """The longer model's blocks and allocations, each with its counterpart in the short model."""

    def __init__(
        self,
        short: BlockedTrace,
        longer: BlockedTrace,
        repetition: LayerRepetition,
    ) -> None:
        once = replace(repetition, copies=1)
        order = block_order(short.keys, once)
        if len(order) != len(longer.spans):
            raise NotUniform(f"{len(longer.spans)} blocks instead of {len(order)}")
        self.short, self.longer = short, longer
        self.copies = order  # of each of the longer model's blocks
        self.blocks = {copy: block for block, copy in enumerate(order)}
        self.group_blocks = {copy.place for copy in order if copy.instance}
        """The short model's blocks that each group repeats."""
        # By the longer model's allocation:
        count = len(longer.trace.sizes)
        self.counterparts = [NO_COUNTERPART] * count  # the short model's that it repeats
        self.growth = [0] * count  # bytes above that one's
        self.per_group: set[int] = set()
        """Those without a counterpart: outside the layers, as many for each further group."""
        for block, copy in enumerate(order):
            self._pair(copy.place, block)

    def pattern_of(self, copy: BlockCopy) -> int:
        """Return the longer model's block that any copy repeats."""
        return self.blocks[BlockCopy(copy.place, min(copy.instance, 1))]

    def maker_of(self, number: int) -> Maker:
        """Return what makes one of the longer model's allocations."""
        block, offset = self.longer.origins[number]
        return Maker(*self.copies[block], offset)

    def twice(self, place: int) -> tuple[int, int]:
        """Return instances 0 and 1 of a block of the group: blocks of the longer model."""
        return self.blocks[BlockCopy(place, 0)], self.blocks[BlockCopy(place, 1)]

    def allocations_at(self, place: int, offset: int) -> tuple[int, int]:
        """Return what an event of the group makes or frees in instances 0 and 1."""
        lower, upper = (self.longer.event_at(block, offset) for block in self.twice(place))
        return abs(lower) - 1, abs(upper) - 1

    def _pair(self, place: int, block: int) -> None:
        """Find the counterparts of a block's allocations."""
        short, longer = self.short, self.longer
        short_key, longer_key = short.keys[place], longer.keys[block]
        if short_key.stay != longer_key.stay:
            raise NotUniform(f"{longer_key.stay.phase} where {short_key.stay.phase} was expected")

        short_events, longer_events = short.events_of(place), longer.events_of(block)
        if _equal_events(short, short_events, longer, longer_events):
            for short_event, longer_event in zip(short_events, longer_events, strict=True):
                if longer_event > 0:
                    self.counterparts[longer_event - 1] = short_event - 1
        elif place in self.group_blocks or longer_key.layer is not None:
            raise NotUniform(
                f"layer {longer_key.layer} in phase {longer_key.stay.phase} differs from its"
                " neighbours"
            )
        else:
            self._align(short_events, longer_events)

    def _align(self, short_events: Sequence[int], longer_events: Sequence[int]) -> None:
        """Match the allocations of a block between the layers, which grows with their number."""
        short_numbers = [event - 1 for event in short_events if event > 0]
        longer_numbers = [event - 1 for event in longer_events if event > 0]
        places = aligned(
            [self.short.size_and_part(number + 1) for number in short_numbers],
            [self.longer.size_and_part(number + 1) for number in longer_numbers],
        )
        self.per_group.update(longer_numbers)
        for short_number, place in zip(short_numbers, places, strict=True):
            number = longer_numbers[place]
            self.per_group.remove(number)
            self.counterparts[number] = short_number
            size = self.longer.trace.sizes[number]
            self.growth[number] = size - self.short.trace.sizes[short_number]


def _equal_events(
    short: BlockedTrace,
    short_events: Sequence[int],
    longer: BlockedTrace,
    longer_events: Sequence[int],
) -> bool:
    """Return True if both make and free the same sizes of the same parts in the same order."""
    if len(short_events) != len(longer_events):
        return False
    for ours, theirs in zip(short_events, longer_events, strict=True):
        if (ours > 0) != (theirs > 0) or short.size_and_part(ours) != longer.size_and_part(theirs):
            return False
    return True
