"""Loops over pieces of rows: as many pieces as a point has, all full but the last.

A loss that works through the rows of a micro-batch has a block with another number of events at
each point. Its allocations are

    before the loop, n pieces of the same s allocations, after the loop

where n depends on the point. In a full piece the sizes are the same everywhere. In the last piece
some are smaller, in proportion to its rows; others, as a piece of the weights, never change. The
pieces are counted from the last one, which is there at every point:

    t(x)      bytes of one allocation that is in proportion to the rows, over all pieces: a formula
    f         its bytes in a full piece
    n(x)      pieces, t(x) / f rounded up
    piece 0   t(x) - (n(x) - 1) f
    piece j   f if j < n(x), else 0: the allocator hands out no block for it

Example: rows in pieces of at most 4,096, with 2 bytes a row and a weight of 100 bytes.

                   rows     n    piece 3      2           1           0
    first point    13,000   4    8192 100     8192 100    8192 100    1424 100
    another point   5,000   2       0   0        0   0    8192 100    1808 100

At a point with more pieces than the first, the first one's stand for them: a loop frees in a piece
what the one before it has made (`_frees_in_time`), so that more pieces hold no more at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autotune.estimate.screening.blocks import TraceBlock
from autotune.estimate.screening.points import Booleans, Integers


@dataclass(frozen=True, kw_only=True)
class PieceLoop:
    """The allocations of a loop over pieces of rows."""

    allocations: Integers
    pieces: Integers  # the piece of each, counted from the last one
    full_sizes: Integers  # of each in a full piece
    follows_rows: Integers  # 1: in proportion to the rows of its piece
    full_bytes: int  # f
    formula: int  # row of `SizeModel.coefficients` of t(x)

    def write_sizes(self, sizes: Integers, values: Integers) -> None:
        """Write the loop's sizes. `values`: of each formula at the point."""
        total_bytes = int(values[self.formula])
        count = max(1, -(-total_bytes // self.full_bytes))
        last_bytes = total_bytes - (count - 1) * self.full_bytes
        is_partial = (self.pieces == 0) & (self.follows_rows == 1)
        in_last = self.full_sizes * last_bytes // self.full_bytes
        of_piece = np.where(is_partial, in_last, self.full_sizes)
        sizes[self.allocations] = np.where(self.pieces < count, of_piece, 0)


class BlockAllocations(NamedTuple):
    """The allocations that a block makes, in order."""

    numbers: Integers
    sizes: Integers
    parts: Integers

    def piece(self, start: int, stop: int) -> BlockAllocations:
        return BlockAllocations(*(column[start:stop] for column in self))


class LoopPlace(NamedTuple):
    """Where the loop is in each copy of a block."""

    slots: int  # allocations of a piece
    before: int  # allocations before the loop
    after: int


class FoundLoop(NamedTuple):
    """A loop in all copies of a block."""

    loop: PieceLoop  # without its formula
    totals: Integers  # t(x) at the point of each copy
    outside: Sequence[BlockAllocations]  # the allocations before and after it, by copy


def find_loop(blocks: Sequence[TraceBlock]) -> FoundLoop | None:
    """Return the loop over pieces of rows in the copies of a block; None without one."""
    copies = list(map(_allocations_of, blocks))
    lengths = [len(copy.numbers) for copy in copies]
    slots = int(np.gcd.reduce(np.subtract(lengths, lengths[0])))
    outside = min(lengths) - slots
    if not slots:
        return None
    for before in range(outside + 1):
        place = _earliest(LoopPlace(slots, before, outside - before), copies)
        found = _loop_at(place, copies)
        if found is not None and _frees_in_time(blocks, place):
            return found
    return None


def _allocations_of(block: TraceBlock) -> BlockAllocations:
    makes = block.allocates
    return BlockAllocations(block.numbers[makes], block.deltas[makes], block.parts[makes])


def _earliest(place: LoopPlace, copies: Sequence[BlockAllocations]) -> LoopPlace:
    """Return the place with the pieces that every point has as full ones."""
    slots, before, after = place
    while before >= slots:
        earlier = np.array([copy.sizes[before - slots : before] for copy in copies])
        following = np.array([copy.sizes[before : before + slots] for copy in copies])
        if not np.array_equal(earlier, following) or np.ptp(earlier, axis=0).any():
            break
        before -= slots
    return LoopPlace(slots, before, after)


def _loop_at(place: LoopPlace, copies: Sequence[BlockAllocations]) -> FoundLoop | None:
    """Return the loop at a place; None if the allocations there are not those of pieces."""
    # 1. The pieces of each copy: a row for each.
    bodies, outside = [], []
    for copy in copies:
        end = len(copy.numbers) - place.after
        bodies.append(copy.piece(place.before, end))
        ends = zip(copy.piece(0, place.before), copy.piece(end, len(copy.numbers)), strict=True)
        outside.append(BlockAllocations(*map(np.concatenate, ends)))
    if not _have_equal_parts(bodies, outside, place.slots):
        return None

    # 2. Full pieces are equal. In the last one, some allocations follow its rows.
    sizes = [body.sizes.reshape(-1, place.slots) for body in bodies]
    full_pieces = np.concatenate([rows[:-1] for rows in sizes])
    last_pieces = np.stack([rows[-1] for rows in sizes])
    full = full_pieces[0]
    if (full_pieces != full).any() or (last_pieces > full).any():
        return None
    follows_rows = (last_pieces != full).any(axis=0)
    if not follows_rows.any():
        return None
    slot = int(np.where(follows_rows, full, 0).argmax())
    if not _are_in_proportion(last_pieces[:, follows_rows], full[follows_rows], full[slot]):
        return None

    # 3. The loop of the first copy.
    first = bodies[0]
    count = len(sizes[0])
    loop = PieceLoop(
        allocations=first.numbers,
        pieces=np.repeat(np.arange(count)[::-1], place.slots),
        full_sizes=np.tile(full, count),
        follows_rows=np.tile(follows_rows, count).astype(np.int64),
        full_bytes=int(full[slot]),
        formula=0,
    )
    totals = np.array([rows[:, slot].sum() for rows in sizes])
    return FoundLoop(loop, totals, outside)


def _have_equal_parts(
    bodies: Sequence[BlockAllocations],
    outside: Sequence[BlockAllocations],
    slots: int,
) -> bool:
    """Return True if all pieces have the same parts, and what is around the loop has."""
    pieces = np.concatenate([body.parts.reshape(-1, slots) for body in bodies])
    around = np.stack([allocations.parts for allocations in outside])
    return bool((pieces == pieces[0]).all() and (around == around[0]).all())


def _are_in_proportion(last_pieces: Integers, full: Integers, full_bytes: int) -> bool:
    """Return True if all allocations (columns) of a last piece are the same share of full ones."""
    column = int((full == full_bytes).argmax())
    shares = last_pieces[:, [column]] * full
    return bool((shares == last_pieces * full_bytes).all())


def _frees_in_time(blocks: Sequence[TraceBlock], place: LoopPlace) -> bool:
    """Return True if what a piece makes is freed before the piece after the next one begins."""
    return all(_frees_pieces_of(block, place) for block in blocks)


def _frees_pieces_of(block: TraceBlock, place: LoopPlace) -> bool:
    made_at = np.flatnonzero(block.allocates)
    freed_at = {int(block.numbers[event]): event for event in np.flatnonzero(~block.allocates)}
    end = len(made_at) - place.after
    never = len(block)
    begins = [*made_at[place.before : end : place.slots], *made_at[end : end + 1], never]
    for allocation in range(place.before, end - place.slots):
        piece = (allocation - place.before) // place.slots
        number = int(block.numbers[made_at[allocation]])
        if freed_at.get(number, never) >= begins[piece + 2]:
            return False
    return True
