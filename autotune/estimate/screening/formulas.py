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
from dataclasses import dataclass, field

import numpy as np

from autotune.estimate.screening.points import Booleans, Floats, Integers

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
            total += coefficient * _product(axes, product)
        if self.cap is not None and self.rounds:
            total = np.ceil(total / self.cap)
        elif self.cap is not None:
            total = np.minimum(total, self.cap)
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

    # Bases of several families.

    def joined(self, further: Basis) -> Basis:
        return Basis(tuple(dict.fromkeys((*self.terms, *further.terms))))

    def widened(self, coefficients: Floats, wider: Basis) -> Floats:
        """Return the coefficients (terms last) in a basis that contains these terms."""
        widened = np.zeros((*coefficients.shape[:-1], len(wider.terms)))
        for column, term in enumerate(self.terms):
            widened[..., wider.terms.index(term)] = coefficients[..., column]
        return widened

    # Fitting. Examples are rows with a column for each point.

    def fit(self, points: Floats, examples: Floats) -> tuple[Floats, Booleans]:
        """Return the coefficients of each row of examples, and whether they are exact."""
        matrix = self.values(points)
        coefficients, is_exact = self._exact_sums(matrix, examples)
        if not is_exact.all():
            coefficients[~is_exact] = self._closest_sums(matrix, examples[~is_exact])
        return coefficients, is_exact

    def _exact_sums(self, matrix: Floats, examples: Floats) -> tuple[Floats, Booleans]:
        """Return the shortest exact sum of each row, and True for rows that have one."""
        coefficients = np.zeros((len(examples), len(self.terms)))
        is_exact = np.zeros(len(examples), dtype=bool)
        tolerances = EXACT * np.maximum(1.0, np.abs(examples).max(axis=1))
        for terms in self._short_sums(min(MAX_TERMS, len(matrix) - 1)):
            rows = np.flatnonzero(~is_exact)
            if not len(rows):
                break
            solved, errors = solve(matrix[:, terms], examples[rows].T)
            is_solved = errors <= tolerances[rows]
            coefficients[np.ix_(rows[is_solved], np.array(terms))] = solved[is_solved]
            is_exact[rows[is_solved]] = True
        return coefficients, is_exact

    def _closest_sums(self, matrix: Floats, examples: Floats) -> Floats:
        """Return the sum of each row with the least error at its worst example."""
        coefficients = np.zeros((len(examples), len(self.terms)))
        least_errors = np.full(len(examples), np.inf)
        for terms in self._short_sums(MAX_APPROXIMATE_TERMS):
            solved, errors = solve(matrix[:, terms], examples.T)
            is_closer = errors < least_errors * (1 - EXACT)
            coefficients[is_closer] = 0.0
            coefficients[np.ix_(is_closer, np.array(terms))] = solved[is_closer]
            least_errors[is_closer] = errors[is_closer]
        return coefficients

    def _short_sums(self, max_terms: int) -> Iterator[list[int]]:
        return short_sums(range(len(self.terms)), max_terms)

    # Caps.

    def with_caps(self, points: Floats, examples: Floats) -> Basis:
        """Add capped sums: of rows that reach their maximum several times."""
        matrix = self.values(points)
        terms = list(self.terms)
        for values in np.abs(examples):
            capped = self._capped_sum(matrix, values)
            if capped is not None and capped not in terms:
                terms.append(capped)
        return Basis(tuple(terms))

    def _capped_sum(self, matrix: Floats, values: Floats) -> Term | None:
        """Return the sum that equals the values below the cap and exceeds it at the others."""
        cap = values.max()
        is_full = values >= cap * (1 - EXACT)
        if is_full.sum() < 2:
            return None
        below = matrix[~is_full]
        full = matrix[is_full]
        for terms in self._short_sums(min(MAX_APPROXIMATE_TERMS, len(below) - 1)):
            coefficients, error = solve(below[:, terms], values[~is_full])
            exceeds_cap = full[:, terms] @ coefficients >= cap * (1 - EXACT)
            if error <= EXACT * cap and exceeds_cap.all():
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


@dataclass(frozen=True, kw_only=True)
class KnownFormulas:
    """Formulas found in one family, so that other families of the same model need fewer examples.

    The same tensors occur with and without recomputation and with any engine: a size that equals a
    known formula at every example is that formula. A trace at the far corner checks this.
    """

    basis: Basis = Basis(())
    coefficients: Floats = field(default_factory=lambda: np.zeros((0, 0)))  # a row per formula

    def fit(self, points: Floats, examples: Floats) -> tuple[KnownFormulas, Floats, Booleans]:
        """Express each row (a column per point) as a known formula or the shortest sum.

        Return the known formulas with those of these rows, the rows' coefficients, and True for
        each row that is exact.
        """
        # 1. Rows that equal a known formula, and the others.
        known_values = self.coefficients @ self.basis.values(points).T
        formula_of_row = _equal_rows(examples, known_values)
        is_new = formula_of_row < 0
        new_basis, new_coefficients, is_new_exact = _fit_new(points, examples[is_new])

        # 2. Both in one basis.
        basis = self.basis.joined(new_basis)
        known_rows = self.basis.widened(self.coefficients, basis)
        coefficients = np.zeros((len(examples), len(basis.terms)))
        coefficients[~is_new] = known_rows[formula_of_row[~is_new]]
        coefficients[is_new] = new_basis.widened(new_coefficients, basis)
        is_exact = np.ones(len(examples), dtype=bool)
        is_exact[is_new] = is_new_exact

        # 3. For inexact rows with few examples, the closest known formula.
        if len(points) < MIN_EXAMPLES_TO_FIT and len(known_rows):
            for row in np.flatnonzero(~is_exact):
                errors = np.abs(known_values - examples[row]).max(axis=1)
                coefficients[row] = known_rows[errors.argmin()]
        formulas = np.unique(np.concatenate([known_rows, coefficients[is_new]]), axis=0)
        return KnownFormulas(basis=basis, coefficients=formulas), coefficients, is_exact


def _equal_rows(examples: Floats, known_values: Floats) -> Integers:
    """Return the known formula that each row of examples equals; -1 for none."""
    formulas: dict[tuple[int, ...], int] = {}
    for formula, values in enumerate(_rounded(known_values)):
        formulas.setdefault(tuple(values), formula)
    rows = [formulas.get(tuple(values), -1) for values in _rounded(examples)]
    return np.array(rows, dtype=np.int64)


def _rounded(values: Floats) -> list[list[int]]:
    rounded: list[list[int]] = np.rint(values).astype(np.int64).tolist()
    return rounded


def _fit_new(points: Floats, examples: Floats) -> tuple[Basis, Floats, Booleans]:
    """Return a basis, the rows' coefficients and which are exact; with caps only if needed."""
    basis = Basis.of(points)
    coefficients, is_exact = basis.fit(points, examples)
    if not is_exact.all():
        basis = basis.with_caps(points, examples[~is_exact])
        coefficients, is_exact = basis.fit(points, examples)
    return basis, coefficients, is_exact


def short_sums(terms: Sequence[int], max_terms: int) -> Iterator[list[int]]:
    """Yield sets of terms, small ones first."""
    for count in range(1, max_terms + 1):
        yield from map(list, itertools.combinations(terms, count))


def solve(matrix: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Return coefficients of each target (a column) and its largest error; infinite if
    rank-deficient.
    """
    scale = np.abs(matrix).max(axis=0)  # a length squared times a batch is a million times a batch
    scaled = matrix / scale
    solved, _, rank, _ = np.linalg.lstsq(scaled, targets, rcond=1e-10)
    if rank < matrix.shape[1]:
        return solved.T, np.full(targets.shape[1:], np.inf)
    return solved.T / scale, np.abs(scaled @ solved - targets).max(axis=0)


def _axes(points: Floats) -> Floats:
    """Return a column for each of AXES."""
    length = points[:, 1] + points[:, 2]
    tiles = np.ceil(length / TILE) * TILE
    rows = np.ceil(points[:, 0] * length / ROWS) * ROWS
    return np.column_stack([points, length, tiles, rows])


def _product(axes: Floats, product: str) -> Floats:
    columns = [axes[:, AXES.index(axis)] for axis in product]
    return np.asarray(np.prod(columns, axis=0, initial=1.0), dtype=np.float64)
