"""Formulas of the point x = (B, P, C, N), found from examples of their values.

    axes      B, P, C, N, and S = P + C, R = S rounded up to a multiple of TILE,
              T = BS rounded up to a multiple of ROWS
    term      t(x): a product of axes, as BS or BCC; or a capped sum of products
    formula   k_1 t_1(x) + ... + k_m t_m(x)

A tensor's size is a product of its dimensions, so few terms suffice: the logits of all but the last
token, 2 V B (S - 1) bytes, are 2V BS - 2V B. Given examples y_1 ... y_n at the points x_1 ... x_n,
sums of one, two and three terms are tried, common ones first. The first that reproduces every
example exactly is the formula: coefficients solve A k = y with A_ij = t_j(x_i), by least squares.

Loops that work in pieces of at most a fixed size have a capped term: min(k_1 t_1(x) + ..., cap).
A value that reaches its maximum at several points, and is a plain sum below it, reveals the cap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autotune.estimate.screening.points import Flags, Floats, Integers

AXES = "BPCNSRT"
"""Batch, prompt, completion, micro-steps, S = P + C, R and T."""

# rounding of FlashAttention's query-gradient accumulator (`flash_api.cpp`, `round_multiple`)
TILE = 128
# rows of one block's threads in sums over the tokens (`Reduce.cuh`: 4 of 16 values each)
ROWS = 64

# fmt: off
COMMONEST_FIRST = (
    "", "B", "BS", "BC", "BP", "BR", "BN", "BNS", "BNC", "BNP", "S", "C", "P", "N",
    "BSS", "BCC", "BPP", "BPC", "SS", "CC", "T",
)
# fmt: on
"""Products that sizes consist of; the empty product is a constant."""

MAX_TERMS = 3  # B x (P + C - 1) has two terms; (S - 1) squared has three
MAX_APPROXIMATE_TERMS = 2  # limit without an exact sum: long sums go astray between examples
EXACT = 1e-9  # relative: examples are integers below 2**53
MIN_EXAMPLES_TO_FIT = 4
"""Number of examples from which the closest short sum beats the closest known one."""


@dataclass(frozen=True)
class Term:
    """A product of axes; or a sum of products up to a cap, the amount of a loop's iteration."""

    products: tuple[tuple[str, float], ...]  # axes and coefficient of each
    cap: float | None = None
    rounds: bool = False  # count iterations, ceil(sum / cap), instead of the amount, min(sum, cap)
    factor: str = ""  # axes whose product multiplies the value

    def values(self, axes: Floats) -> Floats:
        """Return t(x), from a row of AXES for each point."""
        total = np.zeros(len(axes))
        for product, coefficient in self.products:
            total = total + coefficient * _product(axes, product)
        if self.cap is not None:
            total = np.ceil(total / self.cap) if self.rounds else np.minimum(total, self.cap)
        return total * _product(axes, self.factor)


def single(product: str) -> Term:
    """Return a product of axes as a term."""
    return Term(((product, 1.0),))


@dataclass(frozen=True)
class Basis:
    """Terms that are distinguishable over the points of a space."""

    terms: tuple[Term, ...]

    @classmethod
    def of(cls, points: Floats) -> Basis:
        """Return the products of those axes that vary."""
        axes = _axes(points)
        varying = {axis for column, axis in enumerate(AXES) if np.ptp(axes[:, column]) > 0}
        products = [product for product in COMMONEST_FIRST if set(product) <= varying]
        return cls(tuple(map(single, products)))

    def values(self, points: Floats) -> Floats:
        """Return A: a row for each point, a column for each term."""
        axes = _axes(points)
        matrix = np.zeros((len(points), len(self.terms)))
        for column, term in enumerate(self.terms):
            matrix[:, column] = term.values(axes)
        return matrix

    def joined(self, other: Basis) -> Basis:
        return Basis(tuple(dict.fromkeys((*self.terms, *other.terms))))

    def widened(self, coefficients: Floats, wider: Basis) -> Floats:
        """Return the coefficients (terms last) in a basis that contains these terms."""
        widened = np.zeros((*coefficients.shape[:-1], len(wider.terms)))
        for column, term in enumerate(self.terms):
            widened[..., wider.terms.index(term)] = coefficients[..., column]
        return widened

    def with_caps(self, points: Floats, examples: Floats) -> Basis:
        """Add capped sums: of rows that reach their maximum several times."""
        capped: dict[Term, None] = {}
        for row in np.abs(examples):
            is_full = row >= row.max() * (1 - EXACT)
            term = self._capped(points, row, is_full) if is_full.sum() >= 2 else None
            if term is not None:
                capped[term] = None
        return replace(self, terms=(*self.terms, *capped))

    def _capped(
        self,
        points: Floats,
        row: Floats,
        is_full: Flags,
    ) -> Term | None:
        """Fit a sum to the values below the cap; it must exceed the cap at the others."""
        matrix, cap = self.values(points), row.max()
        is_below = ~is_full
        most = min(MAX_APPROXIMATE_TERMS, int(is_below.sum()) - 1)
        for terms in short_sums(range(len(self.terms)), most):
            columns = matrix[:, terms]
            (coefficients,), (error,) = solve(columns[is_below], row[is_below, np.newaxis])
            exceeds = columns[is_full] @ coefficients >= cap * (1 - EXACT)
            if error <= EXACT * cap and exceeds.all():
                return self._capped_term(terms, coefficients, cap)
        return None

    def _capped_term(
        self,
        terms: Sequence[int],
        coefficients: Floats,
        cap: float,
    ) -> Term:
        """Return the sum in units of its largest coefficient: loops over the same rows are equal,
        whatever the bytes of a row.
        """
        unit = float(coefficients.max())
        products = []
        for term, coefficient in zip(terms, coefficients, strict=True):
            axes = self.terms[term].products[0][0]
            products.append((axes, round(float(coefficient) / unit, 9)))
        return Term(tuple(products), cap=round(float(cap) / unit, 6))

    def fit(self, points: Floats, examples: Floats) -> tuple[Floats, Flags]:
        """Return the coefficients of each row of examples (one column per point), and whether they
        are exact.
        """
        matrix = self.values(points)
        coefficients = np.zeros((len(examples), len(self.terms)))
        open_rows = np.arange(len(examples))
        # 1. The shortest exact sums.
        for terms in short_sums(range(len(self.terms)), min(MAX_TERMS, len(points) - 1)):
            if not len(open_rows):
                break
            targets = examples[open_rows]
            solved, errors = solve(matrix[:, terms], targets.T)
            is_exact = errors <= EXACT * np.maximum(1.0, np.abs(targets).max(axis=1))
            coefficients[np.ix_(open_rows[is_exact], np.array(terms))] = solved[is_exact]
            open_rows = open_rows[~is_exact]
        # 2. For the other rows the closest ones.
        coefficients[open_rows] = self._closest(matrix, examples[open_rows])
        is_exact = np.ones(len(examples), dtype=bool)
        is_exact[open_rows] = False
        return coefficients, is_exact

    def _closest(self, matrix: Floats, rows: Floats) -> Floats:
        """Minimise the largest error over the examples; a check trace measures others."""
        best = np.zeros((len(rows), len(self.terms)))
        least = np.full(len(rows), np.inf)
        if not len(rows):
            return best
        for terms in short_sums(range(len(self.terms)), MAX_APPROXIMATE_TERMS):
            solved, errors = solve(matrix[:, terms], rows.T)
            is_better = errors < least * (1 - EXACT)
            best[is_better] = 0.0
            best[np.ix_(is_better, np.array(terms))] = solved[is_better]
            least = np.where(is_better, errors, least)
        return best


@dataclass(frozen=True, kw_only=True)
class KnownFormulas:
    """Formulas found in one family, so that other families of the same model need fewer examples.

    The same tensors occur with and without recomputation and with any engine: a size that equals a
    known formula at every example is that formula. A trace at the far corner checks this.
    """

    basis: Basis = Basis(())
    coefficients: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # a row per formula

    def fit(self, points: Floats, examples: Floats) -> tuple[KnownFormulas, Floats, Flags]:
        """Express each row (a column per point) as a known formula or the shortest sum.

        Return the known formulas with those of these rows, the rows' coefficients, and True for
        each row that is exact.
        """
        # 1. Rows that equal a known formula.
        known_values = self.coefficients @ self.basis.values(points).T
        formula_of = _recognised(examples, known_values)
        is_known = formula_of >= 0
        new = np.flatnonzero(~is_known)
        # 2. The others: shortest exact sums, if necessary with caps.
        own = Basis.of(points)
        fitted, new_exact = own.fit(points, examples[new])
        if not new_exact.all():
            own = own.with_caps(points, examples[new][~new_exact])
            fitted, new_exact = own.fit(points, examples[new])
        # 3. Both in one basis.
        basis = self.basis.joined(own)
        known_rows = self.basis.widened(self.coefficients, basis)
        coefficients = np.zeros((len(examples), len(basis.terms)))
        coefficients[is_known] = known_rows[formula_of[is_known]]
        coefficients[new] = own.widened(fitted, basis)
        # 4. Inexact rows with few examples: the closest known formula.
        if len(points) < MIN_EXAMPLES_TO_FIT and len(known_rows):
            for row in new[~new_exact]:
                errors = np.abs(known_values - examples[row]).max(axis=1)
                coefficients[row] = known_rows[errors.argmin()]
        is_exact = np.ones(len(examples), dtype=bool)
        is_exact[new] = new_exact
        formulas = np.unique(np.concatenate([known_rows, coefficients[new]]), axis=0)
        return KnownFormulas(basis=basis, coefficients=formulas), coefficients, is_exact


def _recognised(examples: Floats, known_values: Floats) -> Integers:
    """Return the known formula that each row of examples equals; -1 for none."""
    formulas: dict[tuple[int, ...], int] = {}
    for formula, values in enumerate(_rounded(known_values)):
        formulas.setdefault(tuple(values), formula)
    rows = [formulas.get(tuple(row), -1) for row in _rounded(examples)]
    return np.array(rows, dtype=np.int64)


def short_sums(terms: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of terms, small ones first."""
    for count in range(1, most + 1):
        yield from itertools.combinations(terms, count)


def solve(matrix: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Return coefficients of each target and its largest error; infinite if rank-deficient."""
    scale = np.abs(matrix).max(axis=0)  # a length squared times a batch is a million times a batch
    solved, _, rank, _ = np.linalg.lstsq(matrix / scale, targets, rcond=1e-10)
    if rank < matrix.shape[1]:
        return solved.T, np.full(targets.shape[1:], np.inf)
    return solved.T / scale, np.abs(matrix / scale @ solved - targets).max(axis=0)


def _product(axes: Floats, product: str) -> Floats:
    columns = [axes[:, AXES.index(axis)] for axis in product]
    return np.asarray(np.prod(columns, axis=0, initial=1.0), dtype=np.float64)


def _axes(points: Floats) -> Floats:
    """Return a column for each of AXES."""
    length = points[:, 1] + points[:, 2]
    tiles = np.ceil(length / TILE) * TILE
    rows = np.ceil(points[:, 0] * length / ROWS) * ROWS
    return np.column_stack([points, length, tiles, rows])


def _rounded(values: Floats) -> list[list[int]]:
    rounded: list[list[int]] = np.rint(values).astype(np.int64).tolist()
    return rounded
