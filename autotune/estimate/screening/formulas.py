"""Sizes of allocations at any point of a space: exact formulas, found from a few examples.

A tensor's size is a product of its dimensions. Over micro-batch B, prompt P, completion C and
micro-steps per generation N it is a sum of few of the terms below. The shortest sum that reproduces
every example exactly is taken.

The events of a step are the same at two points of a space; only sizes differ. If a block has other
events at another point (a loop over rows), its allocations are scaled together: by the bytes that
the block keeps, and by those that it allocates and frees.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autotune.estimate.screening.blocks import (
    PARTS,
    Floats,
    Integers,
    NotUniform,
    Point,
    Sample,
    TraceBlock,
    blocks_of,
    rows_of,
)

Flags = NDArray[np.bool_]

AXES = "BPCNSR"  # batch, prompt, completion, micro-steps, S = P + C, and R = S rounded up to a tile
# rounding of FlashAttention's query-gradient accumulator (`flash_api.cpp`, `round_multiple`)
TILE = 128

COMMONEST_FIRST = (
    "",
    "B",
    "BS",
    "BC",
    "BP",
    "BR",
    "BN",
    "BNS",
    "BNC",
    "BNP",
    "S",
    "C",
    "P",
    "N",
    "BSS",
    "BCC",
    "BPP",
    "BPC",
    "SS",
    "CC",
)

MAX_TERMS = 3  # B x (P + C - 1) has two terms; (S - 1) squared has three
MAX_APPROXIMATE_TERMS = 2  # limit without an exact sum: long sums go astray between examples
EXACT = 1e-9  # relative: examples are integers below 2**53
MIN_EXAMPLES_TO_FIT = (
    4  # number of examples from which the closest short sum beats the closest known one
)


@dataclass(frozen=True)
class Term:
    """A product of axes; or a sum of products up to a cap, the amount of a loop's iteration."""

    products: tuple[tuple[str, float], ...]
    cap: float | None = None
    rounds: bool = False  # count iterations, ceil(sum / cap), instead of the amount, min(sum, cap)
    each: str = ""  # axes whose product multiplies the value

    def values(self, axes: Floats) -> Floats:
        total = np.zeros(len(axes))
        for product, times in self.products:
            total = total + times * _product(axes, product)
        if self.cap is not None:
            total = np.ceil(total / self.cap) if self.rounds else np.minimum(total, self.cap)
        return total * _product(axes, self.each)


@dataclass(frozen=True)
class Basis:
    """Terms that are distinguishable over the points of a space."""

    terms: tuple[Term, ...]

    @classmethod
    def of(cls, points: Floats) -> Basis:
        """Return the products of those axes that vary."""
        axes = _axes(points)
        moving = {axis for place, axis in enumerate(AXES) if np.ptp(axes[:, place]) > 0}
        return cls(
            tuple(Term(((product, 1.0),)) for product in COMMONEST_FIRST if set(product) <= moving)
        )

    def values(self, points: Floats) -> Floats:
        """Return each term at each point, shape (points, terms)."""
        axes = _axes(points)
        return np.stack([term.values(axes) for term in self.terms], axis=1)

    def widened(self, coefficients: Floats, wider: Basis) -> Floats:
        """Return the coefficients (terms last) in a basis that contains these terms."""
        found = np.zeros((*coefficients.shape[:-1], len(wider.terms)))
        if len(self.terms):
            found[..., [wider.terms.index(term) for term in self.terms]] = coefficients
        return found

    def with_caps(self, points: Floats, examples: Floats) -> Basis:
        """Add capped sums: rows that reach their maximum several times, a plain sum elsewhere."""
        rows = [(row, row >= row.max() * (1 - EXACT)) for row in np.abs(examples)]
        found = [self._capped(points, row, full) for row, full in rows if full.sum() >= 2]
        return replace(
            self, terms=(*self.terms, *dict.fromkeys(term for term in found if term is not None))
        )

    def _capped(self, points: Floats, row: Floats, full: Flags) -> Term | None:
        """Fit a sum to the values below the cap; it must exceed the cap at the others."""
        at, top = self.values(points), row.max()
        for terms in short_sums(
            range(len(self.terms)), min(MAX_APPROXIMATE_TERMS, int((~full).sum()) - 1)
        ):
            here = at[:, terms]
            solved, error = solve(here[~full], row[~full, np.newaxis])
            if error[0] <= EXACT * top and (here[full] @ solved[0] >= top * (1 - EXACT)).all():
                unit = float(solved[0].max())
                axes = [self.terms[term].products[0][0] for term in terms]
                products = zip(
                    axes, (round(float(times) / unit, 9) for times in solved[0]), strict=True
                )
                return Term(tuple(products), cap=round(float(top) / unit, 6))
        return None

    def fit(self, points: Floats, examples: Floats) -> tuple[Floats, Flags]:
        """Return coefficients for each row (one column per point), and True if exact."""
        at = self.values(points)
        coefficients = np.zeros((len(examples), len(self.terms)))
        left = np.arange(len(examples))
        for terms in short_sums(range(len(self.terms)), min(MAX_TERMS, len(points) - 1)):
            if not len(left):
                break
            solved, error = solve(at[:, terms], examples[left].T)
            exact = error <= EXACT * np.maximum(1.0, np.abs(examples[left]).max(axis=1))
            coefficients[np.ix_(left[exact], np.array(terms))] = solved[exact]
            left = left[~exact]
        coefficients[left] = self._closest(at, examples[left])
        exactly = np.ones(len(examples), dtype=bool)
        exactly[left] = False
        return coefficients, exactly

    def _closest(self, at: Floats, rows: Floats) -> Floats:
        """Minimise the largest error over the examples; a check trace measures others."""
        best, least = np.zeros((len(rows), len(self.terms))), np.full(len(rows), np.inf)
        for terms in short_sums(range(len(self.terms)), MAX_APPROXIMATE_TERMS) if len(rows) else ():
            solved, error = solve(at[:, terms], rows.T)
            better = error < least * (1 - EXACT)
            best[better] = 0.0
            best[np.ix_(better, np.array(terms))] = solved[better]
            least = np.where(better, error, least)
        return best


@dataclass(frozen=True, kw_only=True)
class KnownFormulas:
    """Formulas found in one family, so that other families of the same model need fewer examples.

    The same tensors occur with and without recomputation and with any engine: a size that equals a
    known formula at every example is that formula. A trace at the far corner checks this.
    """

    basis: Basis = Basis(())
    coefficients: Floats = field(
        default_factory=lambda: np.zeros((0, 0))
    )  # a row of the basis' terms for each formula

    def fit(self, points: Floats, rows: Floats) -> tuple[KnownFormulas, Floats, Flags]:
        """Express each row (a column per point) as a known formula or the shortest sum. Return
        the known formulas with those of these rows, the rows' coefficients, and True for each
        row that is exact.
        """
        # 1. Rows that equal a known formula.
        at = (
            self.coefficients @ self.basis.values(points).T
            if len(self.coefficients)
            else np.zeros((0, len(points)))
        )
        known_places: dict[tuple[int, ...], int] = {}
        for place, values in enumerate(_rounded(at)):
            known_places.setdefault(tuple(values), place)
        places = np.array(
            [known_places.get(tuple(row), -1) for row in _rounded(rows)], dtype=np.int64
        )
        left = np.flatnonzero(places < 0)
        # 2. The others: shortest exact sums, if necessary with caps.
        own = Basis.of(points)
        fitted, exactly = own.fit(points, rows[left])
        if not exactly.all():
            own = own.with_caps(points, rows[left][~exactly])
            fitted, exactly = own.fit(points, rows[left])
        basis = replace(self.basis, terms=tuple(dict.fromkeys((*self.basis.terms, *own.terms))))
        known = self.basis.widened(self.coefficients, basis)
        coefficients = np.zeros((len(rows), len(basis.terms)))
        coefficients[places >= 0] = known[places[places >= 0]]
        coefficients[left] = own.widened(fitted, basis)
        # 3. Inexact rows with few examples: the closest known formula.
        if len(points) < MIN_EXAMPLES_TO_FIT and len(known):
            vague = left[~exactly]
            closest = [np.abs(at - row).max(axis=1).argmin() for row in rows[vague]]
            coefficients[vague] = known[np.array(closest, dtype=np.int64)]
        exact = np.ones(len(rows), dtype=bool)
        exact[left] = exactly
        formulas = np.unique(np.concatenate([known, coefficients[left]]), axis=0)
        return KnownFormulas(basis=basis, coefficients=formulas), coefficients, exact


def short_sums(terms: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of terms, small ones first."""
    for count in range(1, most + 1):
        yield from itertools.combinations(terms, count)


def solve(at: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Return coefficients of each target and its largest error; infinite if rank-deficient."""
    scale = np.abs(at).max(axis=0)  # a length squared times a batch is a million times a batch
    solved, _, rank, _ = np.linalg.lstsq(at / scale, targets, rcond=1e-10)
    if rank < at.shape[1]:
        return solved.T, np.full(targets.shape[1:], np.inf)
    return solved.T / scale, np.abs(at / scale @ solved - targets).max(axis=0)


def _product(values: Floats, axes: str) -> Floats:
    return np.asarray(
        np.prod([values[:, AXES.index(axis)] for axis in axes], axis=0, initial=1.0),
        dtype=np.float64,
    )


def _axes(points: Floats) -> Floats:
    """Return a column for each of AXES."""
    row = points[:, 1] + points[:, 2]
    return np.column_stack([points, row, np.ceil(row / TILE) * TILE])


def _rounded(values: Floats) -> list[list[int]]:
    found: list[list[int]] = np.rint(values).astype(np.int64).tolist()
    return found


# Sizes of a short model's allocations.


class SizeModel:
    """Sizes of the first sample's allocations, in their order."""

    def __init__(self, samples: Sequence[Sample], known: KnownFormulas | None) -> None:
        blocks = [blocks_of(sample.trace) for sample in samples]
        if any(
            [block.key for block in other] != [block.key for block in blocks[0]] for other in blocks
        ):
            raise NotUniform("the order of phases and layers differs between points")
        self._first = np.array(samples[0].trace.sizes, dtype=np.int64)
        rows = _ExampleRows(len(samples))
        self._extra = rows.add(
            np.array([[sample.trace.high_extra_bytes for sample in samples]], dtype=np.float64)
        )
        # 1. Blocks with equal events at all points: a row per allocation. Others: rows per part.
        uniform: list[tuple[Integers, Integers]] = []
        self._scaled: list[_ScaledBlock] = []
        for several in zip(*blocks, strict=True):
            base = (
                several[0].deltas > 0
            )  # equal events: the same allocations and frees, of any sizes
            if all(np.array_equal(block.deltas > 0, base) for block in several):
                made = np.flatnonzero(base)
                sizes = np.stack([block.deltas[made] for block in several], axis=1).astype(
                    np.float64
                )
                uniform.append((several[0].numbers[made], rows.add(sizes)))
            else:
                self._scaled.append(_ScaledBlock(several, rows))
        # Allocations of uniform blocks, and the example row of each.
        self._uniform = [
            np.concatenate([np.zeros(0, dtype=np.int64), *(one[at] for one in uniform)])
            for at in (0, 1)
        ]
        # 2. Fit each distinct row once.
        vectors, self._row_of = rows.unique()
        self.formulas, self._coefficients, exactly = (known or KnownFormulas()).fit(
            rows_of([one.point for one in samples]), vectors
        )
        self.exact = bool(exactly.all())

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
        for chosen, before, rows in zip(
            (self._kept, ~self._kept), self._before, self._rows, strict=True
        ):
            # A part without bytes at the peak has no known growth: it keeps its size.
            growth = np.where(before > 0, values[rows] / np.maximum(1, before), 1.0)
            numbers, parts = self._numbers[chosen], self._parts[chosen]
            sizes[numbers] = np.rint(sizes[numbers] * growth[parts]).astype(np.int64)


def _kept_and_transient_bytes(block: TraceBlock) -> tuple[Integers, Integers]:
    """Return bytes by part, at the block's peak: kept, and freed again."""
    made = block.deltas > 0
    transient = np.isin(block.numbers, block.numbers[made]) & np.isin(
        block.numbers, block.numbers[~made]
    )
    live = np.cumsum(np.where(transient, block.deltas, 0))
    top = int(live.argmax()) + 1 if len(live) else 0
    return _bytes_by_part(block, made & ~transient), _bytes_by_part(
        block, transient & (np.arange(len(live)) < top)
    )


def _bytes_by_part(block: TraceBlock, chosen: NDArray[np.bool_]) -> Integers:
    found = np.zeros(len(PARTS), dtype=np.int64)
    np.add.at(found, block.parts[chosen], block.deltas[chosen])
    return found
