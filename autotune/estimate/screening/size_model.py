"""Sizes of a short model's allocations at any point of a space.

The events of a step are the same at two points of a space; only sizes differ, and each size is a
short formula of batch and lengths (`formulas`). If a block has other events at another point (a
loop over rows), its allocations are scaled together: by the bytes that the block keeps, and by
those that it allocates and frees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.estimate.screening.blocks import PARTS, Floats, Integers, NotUniform, Point, Sample, TraceBlock, blocks_of, rows_of
from autotune.estimate.screening.formulas import KnownFormulas


class SizeModel:
    """Sizes of the first sample's allocations, in their order."""

    def __init__(self, samples: Sequence[Sample], known: KnownFormulas | None) -> None:
        blocks = [blocks_of(sample.trace) for sample in samples]
        if any([block.key for block in other] != [block.key for block in blocks[0]] for other in blocks):
            raise NotUniform("the order of phases and layers differs between points")
        self._first = np.array(samples[0].trace.sizes, dtype=np.int64)
        rows = _ExampleRows(len(samples))
        self._extra = rows.add(np.array([[sample.trace.high_extra_bytes for sample in samples]], dtype=np.float64))
        # 1. Blocks with equal events at all points: a row per allocation. Others: rows per part.
        uniform: list[tuple[Integers, Integers]] = []
        self._scaled: list[_ScaledBlock] = []
        for several in zip(*blocks, strict=True):
            base = several[0].deltas > 0  # equal events: the same allocations and frees, of any sizes
            if all(np.array_equal(block.deltas > 0, base) for block in several):
                made = np.flatnonzero(base)
                sizes = np.stack([block.deltas[made] for block in several], axis=1).astype(np.float64)
                uniform.append((several[0].numbers[made], rows.add(sizes)))
            else:
                self._scaled.append(_ScaledBlock(several, rows))
        # Allocations of uniform blocks, and the example row of each.
        self._uniform = [np.concatenate([np.zeros(0, dtype=np.int64), *(one[at] for one in uniform)]) for at in (0, 1)]
        # 2. Fit each distinct row once.
        vectors, self._row_of = rows.unique()
        fitted = (known or KnownFormulas.empty()).fit(rows_of([one.point for one in samples]), vectors)
        self.formulas, self.exact = fitted.formulas, bool(fitted.exactly.all())
        self._coefficients = fitted.coefficients

    def at(self, points: Sequence[Point]) -> list[Integers]:
        """Return the sizes at each point."""
        found = []
        for values in self._values(points).T:
            sizes = self._first.copy()
            numbers, rows = self._uniform
            sizes[numbers] = values[rows]
            for block in self._scaled:
                block.scale(sizes, values)
            found.append(sizes)
        return found

    def high_extra_bytes(self, points: Sequence[Point]) -> list[int]:
        """Return `Trace.high_extra_bytes` at each point, for any number of layers."""
        found: list[int] = self._values(points)[self._extra[0]].tolist()
        return found

    def _values(self, points: Sequence[Point]) -> Integers:
        values = self._coefficients @ self.formulas.basis.values(rows_of(points)).T
        whole: Integers = np.maximum(0, np.rint(values)).astype(np.int64)
        return whole[self._row_of]


class _ExampleRows:
    """Collects rows of examples, one column per sample."""

    def __init__(self, columns: int) -> None:
        self._rows: list[Floats] = [np.zeros((0, columns))]
        self._count = 0

    def add(self, rows: Floats) -> Integers:
        """Add rows; return their indices."""
        self._rows.append(rows)
        self._count += len(rows)
        return np.arange(self._count - len(rows), self._count)

    def unique(self) -> tuple[Floats, NDArray[np.intp]]:
        """Return the distinct rows, and the place of each added row among them."""
        vectors, back = np.unique(np.concatenate(self._rows), axis=0, return_inverse=True)
        return vectors, back.reshape(-1)


class _ScaledBlock:
    """A block with different events: the first sample's allocations, scaled by part."""

    def __init__(self, several: Sequence[TraceBlock], rows: _ExampleRows) -> None:
        first = several[0]
        made = first.deltas > 0
        self._numbers, self._parts = first.numbers[made], first.parts[made]
        self._kept = ~np.isin(self._numbers, first.numbers[~made])
        self._before = _kept_and_transient_bytes(first)
        examples = zip(*map(_kept_and_transient_bytes, several), strict=True)
        self._rows = [rows.add(np.stack(one, axis=1).astype(np.float64)) for one in examples]

    def scale(self, sizes: Integers, values: Integers) -> None:
        for chosen, before, rows in zip((self._kept, ~self._kept), self._before, self._rows, strict=True):
            # A part without bytes at the peak has no known growth: it keeps its size.
            growth = np.where(before > 0, values[rows] / np.maximum(1, before), 1.0)
            numbers, parts = self._numbers[chosen], self._parts[chosen]
            sizes[numbers] = np.rint(sizes[numbers] * growth[parts]).astype(np.int64)


def _kept_and_transient_bytes(block: TraceBlock) -> tuple[Integers, Integers]:
    """Return bytes by part, at the block's peak: kept, and freed again."""
    made = block.deltas > 0
    transient = np.isin(block.numbers, block.numbers[made]) & np.isin(block.numbers, block.numbers[~made])
    live = np.cumsum(np.where(transient, block.deltas, 0))
    top = int(live.argmax()) + 1 if len(live) else 0
    return _bytes_by_part(block, made & ~transient), _bytes_by_part(block, transient & (np.arange(len(live)) < top))


def _bytes_by_part(block: TraceBlock, chosen: NDArray[np.bool_]) -> Integers:
    found = np.zeros(len(PARTS), dtype=np.int64)
    np.add.at(found, block.parts[chosen], block.deltas[chosen])
    return found
