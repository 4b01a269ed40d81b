"""Sizes of a short model's allocations as formulas of the point.

At the points x_1 ... x_n of a family the steps have the same blocks. A block of equal events at all
of them is *uniform*: the k-th allocation is the same tensor everywhere, and its sizes at the points
are the examples of its formula (`formulas`).

The others contain a loop whose length depends on the point. One over pieces of rows, of which
nothing is kept, has as many pieces as the point (`loops`). Around any other loop, events in front
of it and behind it are uniform as well, with as many of its iterations as every point has, if
their sizes have formulas. Of the allocations between, the block keeps some and frees others. Of a
part of memory (weights, activations, ...) of which it keeps as many at every point, those kept are
the same tensors, each with a formula. All others are those of the first point. Of a part, those
that are kept grow by one factor, and so do those that are freed:

    size at x = size at x_1 * G(x) / G(x_1)

where G(x) is their sum at the block's peak, a formula as well.

Example: a loop over at most 4,096 tokens at a time keeps 4 bytes of each token, and frees a tensor
of 100 bytes for each token of the iteration before the next one begins.

                        iterations          kept bytes    freed bytes, at their peak
    x_1    4,096 tokens    1                    16,384            409,600
    x     10,000 tokens    3                    40,000            409,600

Kept bytes add up over the iterations, freed ones are there once. So the kept allocation of x_1 is
scaled by 40,000 / 16,384, and the freed one stays: together the first iteration then has what the
loop has at its peak. One scale for both would make 1,000,000 bytes of the freed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autotune.estimate.screening.blocks import PARTS, TraceBlock, blocks_of
from autotune.estimate.screening.formulas import Basis, KnownFormulas
from autotune.estimate.screening.loops import PieceLoop, loop_in
from autotune.estimate.screening.points import (
    Booleans,
    Floats,
    Integers,
    NotUniform,
    Point,
    Sample,
    integers,
    rows_of,
)

LOGITS_PART = PARTS.index("logits")


@dataclass(frozen=True, kw_only=True)
class ScaledAllocations:
    """Allocations of a block with different events that grow together, by part."""

    allocations: Integers
    parts: Integers  # index in PARTS of each
    bytes_at_first: Integers  # G(x_1) by part
    formulas: Integers  # row of `SizeModel.coefficients` of G(x), by part

    def scale(self, sizes: Integers, values: Integers) -> None:
        """Scale these allocations' sizes. `values`: of each formula at the point."""
        first = self.bytes_at_first
        # A part without bytes at the peak has no known growth: it keeps its size.
        ratio = values[self.formulas] / np.maximum(1, first)
        growth_by_part = np.where(first > 0, ratio, 1.0)
        growth = growth_by_part[self.parts]
        scaled = np.rint(sizes[self.allocations] * growth)
        sizes[self.allocations] = scaled.astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class SizeModel:
    """Sizes of the short model's allocations at any point, in columns."""

    basis: Basis
    coefficients: Floats  # a row for each formula
    sizes_at_first: Integers  # of all allocations, at the first point
    uniform: Integers  # allocations of uniform blocks
    formula_of: Integers  # row of `coefficients` for each of them
    scaled: tuple[ScaledAllocations, ...]
    loops: tuple[PieceLoop, ...]
    extra_formula: int  # row of `coefficients` for `Trace.high_extra_bytes`, for any depth
    is_exact: bool  # every formula reproduces its examples
    known_formulas: KnownFormulas  # those of this family and of families before it

    def sizes_at(self, point: Point) -> Integers:
        """Return s_a(x) of each allocation a."""
        values = self._formula_values([point]).ravel()
        sizes = self.sizes_at_first.copy()
        sizes[self.uniform] = values[self.formula_of]
        for allocations in self.scaled:
            allocations.scale(sizes, values)
        for loop in self.loops:
            loop.write_sizes(sizes, values)
        return sizes

    def high_extra_bytes(self, points: Sequence[Point]) -> list[int]:
        """Return `Trace.high_extra_bytes` at each point."""
        values = self._formula_values(points)
        extra_bytes: list[int] = values[self.extra_formula].tolist()
        return extra_bytes

    def _formula_values(self, points: Sequence[Point]) -> Integers:
        """Return the value of each formula (rows) at each point, in whole bytes."""
        matrix = self.basis.values(rows_of(points))
        values = np.rint(self.coefficients @ matrix.T)
        whole_bytes: Integers = np.maximum(0, values).astype(np.int64)
        return whole_bytes


def fit_sizes(samples: Sequence[Sample], known_formulas: KnownFormulas | None) -> SizeModel:
    """Return the sizes of the first sample's allocations as formulas. NotUniform if the samples
    have other blocks. `known_formulas`: of another family.
    """
    # 1. Examples of each formula: of the extra bytes, and of the sizes in each block.
    earlier = known_formulas or KnownFormulas()
    points = rows_of([sample.point for sample in samples])

    def have_formulas(rows: Integers) -> Booleans:
        *_, is_exact = earlier.fit(points, rows.astype(np.float64))
        return is_exact

    examples = _Examples()
    extra_bytes = [sample.trace.high_extra_bytes for sample in samples]
    (extra_row,) = examples.add(np.array([extra_bytes]))
    empty = integers([])
    uniform = [empty]
    uniform_rows = [empty]
    scaled: list[ScaledAllocations] = []
    loops: list[PieceLoop] = []
    for blocks in _blocks_of_samples(samples):
        in_loop = loop_in(blocks)
        if in_loop is not None and have_formulas(in_loop.totals[np.newaxis]).all():
            (total_row,) = examples.add(in_loop.totals[np.newaxis])
            loops.append(replace(in_loop.loop, formula=int(total_row)))
            uniform.append(in_loop.outside[0].numbers)
            uniform_rows.append(examples.add(in_loop.sizes_outside))
            continue
        for sections in _sections(blocks, have_formulas):
            if _have_equal_events(sections):
                first = sections[0]
                sizes = [section.deltas[section.allocates] for section in sections]
                rows = examples.add(np.stack(sizes, axis=1))
                uniform.append(first.numbers[first.allocates])
                uniform_rows.append(rows)
                continue
            alike = _kept_alike(sections, have_formulas)
            uniform.append(alike.allocations)
            uniform_rows.append(examples.add(alike.sizes))
            scaled += _kept_and_freed(sections, examples, alike)

    # 2. The formula of each distinct row of examples.
    distinct, formulas = examples.distinct()
    known_formulas, coefficients, is_exact = earlier.fit(points, distinct)

    # 3. Rows of examples become those of their formulas.
    with_formulas = []
    for allocations in scaled:
        with_formulas.append(replace(allocations, formulas=formulas[allocations.formulas]))
    piece_loops = []
    for loop in loops:
        formula = int(formulas[loop.formula])
        piece_loops.append(replace(loop, formula=formula))
    formula_of = formulas[np.concatenate(uniform_rows)]
    return SizeModel(
        basis=known_formulas.basis,
        coefficients=coefficients,
        sizes_at_first=integers(samples[0].trace.sizes),
        uniform=np.concatenate(uniform),
        formula_of=formula_of,
        scaled=tuple(with_formulas),
        loops=tuple(piece_loops),
        extra_formula=int(formulas[extra_row]),
        is_exact=bool(is_exact.all()),
        known_formulas=known_formulas,
    )


def _have_equal_events(blocks: Sequence[TraceBlock]) -> bool:
    """Return True if all allocate and free in the same order."""
    pattern = blocks[0].allocates
    return all(np.array_equal(block.allocates, pattern) for block in blocks)


def _blocks_of_samples(samples: Sequence[Sample]) -> list[tuple[TraceBlock, ...]]:
    """Return each block as it is in every sample."""
    blocks_by_sample = [blocks_of(sample.trace) for sample in samples]
    keys = [block.key for block in blocks_by_sample[0]]
    for blocks in blocks_by_sample:
        if [block.key for block in blocks] != keys:
            raise NotUniform("the order of phases and layers differs between points")
    return list(zip(*blocks_by_sample, strict=True))


def _sections(
    blocks: Sequence[TraceBlock],
    have_formulas: Callable[[Integers], Booleans],
) -> list[list[TraceBlock]]:
    """Return the sections of a block, each as in every sample: all of it, or with a loop whose
    length depends on the point, what is before it, the loop, and what is after it.
    """
    if _have_equal_events(blocks):
        return [list(blocks)]
    # The loop begins where the events differ. At the point with the fewest iterations this may
    # leave none of them inside: the loop then begins one iteration earlier.
    lengths = list(map(len, blocks))
    iteration = int(np.gcd.reduce(np.subtract(lengths, lengths[0])))
    for kept_events in (0, iteration):
        begins, loops, ends = _around_loop(blocks, kept_events, have_formulas)
        if _is_scalable(loops):
            return [begins, loops, ends]
    return [list(blocks)]


def _around_loop(
    blocks: Sequence[TraceBlock],
    kept_events: int,
    have_formulas: Callable[[Integers], Booleans],
) -> tuple[list[TraceBlock], list[TraceBlock], list[TraceBlock]]:
    """Return the equal events at the begin, the loop with that many events or more, and the end."""
    shortest = min(map(len, blocks))
    before = max(0, _equal_events(blocks, have_formulas) - kept_events)
    backwards = [block.between(before, None).reversed() for block in blocks]
    after = _equal_events(backwards, have_formulas)
    after = min(after, shortest - before - kept_events)
    begins, loops, ends = [], [], []
    for block in blocks:
        end = len(block) - after
        begins.append(block.between(0, before))
        loops.append(block.between(before, end))
        ends.append(block.between(end, None))
    return begins, loops, ends


def _is_scalable(loops: Sequence[TraceBlock]) -> bool:
    """Return True if the first loop represents the others: it keeps and frees what any of them
    does, and all of them free the same parts. Pieces of logits, of which the last is smaller, are
    alike in whole blocks only.
    """
    if any((loop.parts == LOGITS_PART).any() for loop in loops):
        return False
    is_kept = _by_block(loops, _kept_bytes) > 0
    is_freed = _by_block(loops, _freed_bytes) > 0
    first_keeps_all = is_kept[:, 0] >= is_kept.any(axis=1)
    free_the_same = is_freed.all(axis=1) >= is_freed.any(axis=1)
    return bool(first_keeps_all.all() and free_the_same.all())


def _equal_events(
    blocks: Sequence[TraceBlock],
    have_formulas: Callable[[Integers], Booleans],
) -> int:
    """Return how many of the first events are the same everywhere, with a formula of each size."""
    length = min(map(len, blocks))
    shortened = [block.between(0, length) for block in blocks]
    deltas = np.stack([block.deltas for block in shortened], axis=1)
    parts = np.stack([block.parts for block in shortened], axis=1)
    is_other_kind = (np.sign(deltas) != np.sign(deltas[:, :1])).any(axis=1)
    is_other_part = (parts != parts[:, :1]).any(axis=1)
    equal = _first(is_other_kind | is_other_part)
    if not equal:
        return 0
    distinct, places = np.unique(np.abs(deltas[:equal]), axis=0, return_inverse=True)
    return _first(~have_formulas(distinct)[places.reshape(-1)])


def _first(marked: Booleans) -> int:
    """Return the place of the first mark, or the number of places."""
    return int(marked.argmax()) if marked.any() else len(marked)


class _Examples:
    """Rows of examples, one column per sample."""

    def __init__(self) -> None:
        self._rows: list[Integers] = []
        self._count = 0

    def add(self, rows: Integers) -> Integers:
        """Add rows; return their numbers."""
        begin = self._count
        self._rows.append(rows)
        self._count += len(rows)
        return np.arange(begin, self._count)

    def distinct(self) -> tuple[Floats, Integers]:
        """Return the distinct rows, and the place of each added row among them."""
        rows = np.concatenate(self._rows)
        examples = rows.astype(np.float64)
        distinct, places = np.unique(examples, axis=0, return_inverse=True)
        return distinct, places.reshape(-1)


class KeptAlike(NamedTuple):
    """What a block keeps, of parts of which it keeps as many allocations at every point: the same
    tensors, as one into which a loop's rows are joined.
    """

    parts: Integers
    allocations: Integers  # the first sample's
    sizes: Integers  # a row for each, a column for each sample


def _kept_alike(
    blocks: Sequence[TraceBlock],
    have_formulas: Callable[[Integers], Booleans],
) -> KeptAlike:
    parts = []
    allocations = [integers([])]
    sizes = [np.zeros((0, len(blocks)), dtype=np.int64)]
    for part in range(len(PARTS)):
        of_part = [_kept_of_part(block, part) for block in blocks]
        counts = set(map(len, of_part))
        if len(counts) > 1 or counts == {0}:
            continue
        rows = np.stack([block.deltas for block in of_part], axis=1)
        if have_formulas(rows).all():
            parts.append(part)
            allocations.append(of_part[0].numbers)
            sizes.append(rows)
    return KeptAlike(
        parts=integers(parts),
        allocations=np.concatenate(allocations),
        sizes=np.concatenate(sizes),
    )


def _kept_of_part(block: TraceBlock, part: int) -> TraceBlock:
    """Return the events that make what the block keeps of a part."""
    is_kept = block.allocates & ~_is_transient(block)
    return block.only(is_kept & (block.parts == part))


def _kept_and_freed(
    blocks: Sequence[TraceBlock],
    examples: _Examples,
    alike: KeptAlike,
) -> list[ScaledAllocations]:
    """Return what the first of these blocks keeps, and what it frees again. `alike`: what has
    formulas of its own.
    """
    first = blocks[0]
    if len(first) == 0:
        return []  # there is nothing to scale
    is_transient = _is_transient(first)
    is_alike = np.isin(first.parts, alike.parts)
    kept_bytes = _by_block(blocks, _kept_bytes)
    freed_bytes = _by_block(blocks, _freed_bytes)
    return [
        _scaled_together(first, first.allocates & ~is_transient & ~is_alike, kept_bytes, examples),
        _scaled_together(first, first.allocates & is_transient, freed_bytes, examples),
    ]


def _by_block(
    blocks: Sequence[TraceBlock],
    bytes_by_part: Callable[[TraceBlock], Integers],
) -> Integers:
    """Return a row for each part, a column for each block."""
    columns = map(bytes_by_part, blocks)
    return np.stack(list(columns), axis=1)


def _scaled_together(
    first: TraceBlock,
    is_member: Booleans,
    bytes_by_sample: Integers,
    examples: _Examples,
) -> ScaledAllocations:
    """Return the first block's allocations that these events make, with their growth."""
    rows = examples.add(bytes_by_sample)
    return ScaledAllocations(
        allocations=first.numbers[is_member],
        parts=first.parts[is_member],
        bytes_at_first=bytes_by_sample[:, 0].copy(),
        formulas=rows,
    )


def _is_transient(block: TraceBlock) -> Booleans:
    """Return True for events whose allocation the block both makes and frees."""
    allocated = block.numbers[block.allocates]
    freed = block.numbers[~block.allocates]
    is_allocated = np.isin(block.numbers, allocated)
    is_freed = np.isin(block.numbers, freed)
    return is_allocated & is_freed


def _kept_bytes(block: TraceBlock) -> Integers:
    """Return the bytes by part that the block makes and does not free."""
    return _bytes_by_part(block, block.allocates & ~_is_transient(block))


def _freed_bytes(block: TraceBlock) -> Integers:
    """Return the bytes by part that the block frees again, where they are most."""
    is_transient = _is_transient(block)
    changes = np.where(is_transient, block.deltas, 0)
    live = np.cumsum(changes)
    peak = int(live.argmax()) if len(live) else 0
    until_peak = np.arange(len(live)) <= peak
    return _bytes_by_part(block, is_transient & until_peak)


def _bytes_by_part(block: TraceBlock, is_counted: Booleans) -> Integers:
    total = np.zeros(len(PARTS), dtype=np.int64)
    parts = block.parts[is_counted]
    np.add.at(total, parts, block.deltas[is_counted])
    return total
