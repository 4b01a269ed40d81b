"""How large a short model's allocations are at any point of a space.

Between two points of one space the events of a step are the same, only their sizes differ, and each size is a short sum of
products of batch and lengths (`monomials`). Where a stretch has other events at another point (a loop over rows), its
allocations grow together with what the stretch keeps and with what passes in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.predict.pieces.blocks import PARTS, Block, Integers, NotUniform, blocks_of
from autotune.predict.pieces.monomials import Floats
from autotune.predict.pieces.points import Point, Sample, rows_of
from autotune.predict.pieces.vocabulary import Vocabulary


class Sizes:
    """Of the first sample's allocations, in their order."""

    def __init__(self, samples: Sequence[Sample], lent: Vocabulary | None) -> None:
        laid = [blocks_of(sample.trace) for sample in samples]
        if any([block.key for block in other] != [block.key for block in laid[0]] for other in laid):
            raise NotUniform("the step takes another course at another point")
        self._first = np.array(samples[0].trace.sizes, dtype=np.int64)
        rows = _Rows(len(samples))
        self._extra = rows.add(np.array([[sample.trace.high_extra_bytes for sample in samples]], dtype=np.float64))
        alike: list[tuple[Integers, Integers]] = []
        self._summed: list[_Summed] = []
        for several in zip(*laid, strict=True):
            if _are_alike(several):
                made = np.flatnonzero(several[0].deltas > 0)
                taken = np.stack([block.deltas[made] for block in several], axis=1).astype(np.float64)
                alike.append((several[0].numbers[made], rows.add(taken)))
            else:
                self._summed.append(_Summed(several, rows))
        self._alike = [np.concatenate([np.zeros(0, dtype=np.int64), *(one[at] for one in alike)]) for at in (0, 1)]
        """Allocations whose stretches have the same events everywhere, and the row of each."""
        vectors, self._back = rows.unique()
        said = (lent or Vocabulary.empty()).say(rows_of([one.point for one in samples]), vectors)
        self.vocabulary, self.exact = said.vocabulary, bool(said.exactly.all())
        self._coefficients = said.coefficients

    def at(self, points: Sequence[Point]) -> list[Integers]:
        """One array for each point."""
        values = self._values(points)
        return [self._of(values[:, place]) for place in range(len(points))]

    def high_extra_bytes(self, points: Sequence[Point]) -> list[int]:
        """How much more data could make of it."""
        found: list[int] = self._values(points)[self._extra[0]].tolist()
        return found

    def _values(self, points: Sequence[Point]) -> Integers:
        values = self._coefficients @ self.vocabulary.basis.values(rows_of(points)).T
        whole: Integers = np.maximum(0, np.rint(values)).astype(np.int64)
        return whole[self._back]

    def _of(self, values: Integers) -> Integers:
        sizes = self._first.copy()
        numbers, rows = self._alike
        sizes[numbers] = values[rows]
        for summed in self._summed:
            summed.put(sizes, values)
        return sizes


class _Rows:
    """Collects examples of what is to be said, one column per sample."""

    def __init__(self, columns: int) -> None:
        self._rows: list[Floats] = [np.zeros((0, columns))]
        self._count = 0

    def add(self, rows: Floats) -> Integers:
        self._rows.append(rows)
        self._count += len(rows)
        return np.arange(self._count - len(rows), self._count)

    def unique(self) -> tuple[Floats, NDArray[np.intp]]:
        """Each once, and where each of those that were added is among them."""
        vectors, back = np.unique(np.concatenate(self._rows), axis=0, return_inverse=True)
        return vectors, back.reshape(-1)


class _Summed:
    """A stretch whose events differ from point to point: the first sample's, grown by part."""

    def __init__(self, several: Sequence[Block], rows: _Rows) -> None:
        first = several[0]
        made = first.deltas > 0
        self._numbers, self._parts = first.numbers[made], first.parts[made]
        self._kept = ~np.isin(self._numbers, first.numbers[~made])
        self._before = _kept_and_passing(first)
        examples = zip(*map(_kept_and_passing, several), strict=True)
        self._rows = [rows.add(np.stack(one, axis=1).astype(np.float64)) for one in examples]

    def put(self, sizes: Integers, values: Integers) -> None:
        for chosen, before, rows in zip((self._kept, ~self._kept), self._before, self._rows, strict=True):
            # Of a part that has nothing at the highest moment it is not known how it grows: it stays.
            growth = np.where(before > 0, values[rows] / np.maximum(1, before), 1.0)
            numbers, parts = self._numbers[chosen], self._parts[chosen]
            sizes[numbers] = np.rint(sizes[numbers] * growth[parts]).astype(np.int64)


def _kept_and_passing(block: Block) -> tuple[Integers, Integers]:
    """Bytes by part of what it makes and keeps, and of what it makes and gives back when that is most."""
    made = block.deltas > 0
    passing = np.isin(block.numbers, block.numbers[made]) & np.isin(block.numbers, block.numbers[~made])
    live = np.cumsum(np.where(passing, block.deltas, 0))
    top = int(live.argmax()) + 1 if len(live) else 0
    return _by_part(block, made & ~passing), _by_part(block, passing & (np.arange(len(live)) < top))


def _by_part(block: Block, which: NDArray[np.bool_]) -> Integers:
    found = np.zeros(len(PARTS), dtype=np.int64)
    np.add.at(found, block.parts[which], block.deltas[which])
    return found


def _are_alike(several: Sequence[Block]) -> bool:
    """Whether they have the same events, of whatever sizes."""
    base = several[0]
    return all(len(one.deltas) == len(base.deltas) and np.array_equal(one.deltas > 0, base.deltas > 0) for one in several)
