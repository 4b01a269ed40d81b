"""Sizes of a short model's allocations as formulas of the point.

At the points x_1 ... x_n of a family the steps have the same blocks. A block of equal events at all
of them is *uniform*: the k-th allocation is the same tensor everywhere, and its sizes at the points
are the examples of its formula (`formulas`).

The others contain a loop whose length depends on the point. Their allocations are those of the
first point, in two groups: bytes that the block keeps, and bytes that it frees again. Each group is
scaled by part: size = size at the first point * G(x) / G(x_1), where G(x) are the group's bytes of
that part at the block's peak, a formula as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.estimate.screening.blocks import PARTS, TraceBlock, blocks_of
from autotune.estimate.screening.formulas import Basis, KnownFormulas
from autotune.estimate.screening.points import (
    Booleans,
    Floats,
    Integers,
    NotUniform,
    Point,
    Sample,
    rows_of,
)


@dataclass(frozen=True, kw_only=True)
class ScaledGroup:
    """Allocations of a block with different events that grow together, by part."""

    allocations: Integers
    parts: Integers  # index in PARTS of each
    bytes_at_first: Integers  # G(x_1) by part
    formulas: Integers  # row of `SizeModel.coefficients` of G(x), by part

    def scale(self, sizes: Integers, values: Integers) -> None:
        """Scale the group's sizes. `values`: of each formula at the point."""
        first = self.bytes_at_first
        # A part without bytes at the peak has no known growth: it keeps its size.
        growth = np.where(first > 0, values[self.formulas] / np.maximum(1, first), 1.0)
        scaled = sizes[self.allocations] * growth[self.parts]
        sizes[self.allocations] = np.rint(scaled).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class SizeModel:
    """Sizes of the short model's allocations at any point, in columns."""

    basis: Basis
    coefficients: Floats  # a row for each formula
    sizes_at_first: Integers  # of all allocations, at the first point
    uniform: Integers  # allocations of uniform blocks
    formula_of: Integers  # row of `coefficients` for each of them
    scaled: tuple[ScaledGroup, ...]
    extra_formula: int  # row of `coefficients` for `Trace.high_extra_bytes`, for any depth
    is_exact: bool  # every formula reproduces its examples
    known_formulas: KnownFormulas  # those of this family and of families before it

    def sizes_at(self, point: Point) -> Integers:
        """Return s_a(x) of each allocation a."""
        values = self._formula_values([point])[:, 0]
        sizes = self.sizes_at_first.copy()
        sizes[self.uniform] = values[self.formula_of]
        for group in self.scaled:
            group.scale(sizes, values)
        return sizes

    def high_extra_bytes(self, points: Sequence[Point]) -> list[int]:
        """Return `Trace.high_extra_bytes` at each point."""
        extra: list[int] = self._formula_values(points)[self.extra_formula].tolist()
        return extra

    def _formula_values(self, points: Sequence[Point]) -> Integers:
        """Return the value of each formula (rows) at each point, in whole bytes."""
        values = self.coefficients @ self.basis.values(rows_of(points)).T
        rounded: Integers = np.maximum(0, np.rint(values)).astype(np.int64)
        return rounded


def fit_sizes(samples: Sequence[Sample], known_formulas: KnownFormulas | None) -> SizeModel:
    """Return the sizes of the first sample's allocations as formulas. NotUniform if the samples
    have other blocks. `known_formulas`: of another family.
    """
    # 1. Examples of each formula: of the extra bytes, and of the sizes in each block.
    examples = _Examples()
    extra_bytes = [sample.trace.high_extra_bytes for sample in samples]
    (extra_row,) = examples.add(np.array([extra_bytes]))
    empty = np.zeros(0, dtype=np.int64)
    uniform = [empty]
    uniform_rows = [empty]
    scaled: list[ScaledGroup] = []
    for blocks in _blocks_of_samples(samples):
        first = blocks[0]
        if all(np.array_equal(block.allocates, first.allocates) for block in blocks):
            sizes = np.stack([block.deltas[block.allocates] for block in blocks], axis=1)
            uniform.append(first.numbers[first.allocates])
            uniform_rows.append(examples.add(sizes))
        else:
            scaled += _scaled_groups(blocks, examples)

    # 2. The formula of each distinct row of examples.
    rows, formulas = examples.distinct()
    points = rows_of([sample.point for sample in samples])
    earlier = known_formulas or KnownFormulas()
    known_formulas, coefficients, is_exact = earlier.fit(points, rows)

    return SizeModel(
        basis=known_formulas.basis,
        coefficients=coefficients,
        sizes_at_first=np.array(samples[0].trace.sizes, dtype=np.int64),
        uniform=np.concatenate(uniform),
        formula_of=formulas[np.concatenate(uniform_rows)],
        scaled=tuple(replace(group, formulas=formulas[group.formulas]) for group in scaled),
        extra_formula=int(formulas[extra_row]),
        is_exact=bool(is_exact.all()),
        known_formulas=known_formulas,
    )


def _blocks_of_samples(samples: Sequence[Sample]) -> list[tuple[TraceBlock, ...]]:
    """Return for each block its copy in every sample."""
    blocks_by_sample = [blocks_of(sample.trace) for sample in samples]
    keys = [block.key for block in blocks_by_sample[0]]
    for blocks in blocks_by_sample:
        if [block.key for block in blocks] != keys:
            raise NotUniform("the order of phases and layers differs between points")
    return list(zip(*blocks_by_sample, strict=True))


class _Examples:
    """Rows of examples, one column per sample."""

    def __init__(self) -> None:
        self._rows: list[Integers] = []
        self._count = 0

    def add(self, rows: Integers) -> Integers:
        """Add rows; return their numbers."""
        self._rows.append(rows)
        self._count += len(rows)
        return np.arange(self._count - len(rows), self._count)

    def distinct(self) -> tuple[Floats, Integers]:
        """Return the distinct rows, and the place of each added row among them."""
        rows = np.concatenate(self._rows).astype(np.float64)
        distinct, places = np.unique(rows, axis=0, return_inverse=True)
        return distinct, places.reshape(-1)


def _scaled_groups(blocks: Sequence[TraceBlock], examples: _Examples) -> list[ScaledGroup]:
    """Return what the first of these blocks keeps, and what it frees again."""
    first = blocks[0]
    allocations = first.numbers[first.allocates]
    parts = first.parts[first.allocates]
    is_freed = np.isin(allocations, first.numbers[~first.allocates])
    retained, transient = zip(*map(_retained_and_transient_bytes, blocks), strict=True)

    groups = []
    for is_member, bytes_by_sample in ((~is_freed, retained), (is_freed, transient)):
        group = ScaledGroup(
            allocations=allocations[is_member],
            parts=parts[is_member],
            bytes_at_first=bytes_by_sample[0],
            formulas=examples.add(np.stack(bytes_by_sample, axis=1)),
        )
        groups.append(group)
    return groups


def _retained_and_transient_bytes(block: TraceBlock) -> tuple[Integers, Integers]:
    """Return bytes by part, at the block's peak: kept, and freed again."""
    is_freed = np.isin(block.numbers, block.numbers[~block.allocates])
    is_made = np.isin(block.numbers, block.numbers[block.allocates])
    is_transient = is_made & is_freed
    live = np.cumsum(np.where(is_transient, block.deltas, 0))
    until_peak = np.arange(len(live)) <= live.argmax()
    retained = _bytes_by_part(block, block.allocates & ~is_transient)
    return retained, _bytes_by_part(block, is_transient & until_peak)


def _bytes_by_part(block: TraceBlock, is_counted: Booleans) -> Integers:
    total = np.zeros(len(PARTS), dtype=np.int64)
    np.add.at(total, block.parts[is_counted], block.deltas[is_counted])
    return total
