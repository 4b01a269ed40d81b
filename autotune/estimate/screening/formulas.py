"""Formulas of the point x = (B, P, C, N), found from examples of their values.

    axes      B, P, C, N, and S = P + C, R = S rounded up to a multiple of TILE,
              T, U = BS and 2BS rounded up to a multiple of TOKEN_ROWS
              E = BS / SEGMENT_ROWS rounded down
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
from typing import NamedTuple

import numpy as np

from autotune.estimate.screening.points import Booleans, Floats, Integers, integers

AXES = "BPCNSRTUE"
"""Batch, prompt, completion, micro-steps, S = P + C, R, T, U and E."""

# rounding of FlashAttention's query-gradient accumulator (`flash_api.cpp`, `round_multiple`)
TILE = 128
# rows of one block's threads in sums over the tokens (`Reduce.cuh`: 4 of 16 values each)
TOKEN_ROWS = 64
# rows of a segment in an embedding's gradient (`EmbeddingBackwardKernel.cu`)
SEGMENT_ROWS = 10

# fmt: off
COMMONEST_FIRST = (
    "", "B", "BS", "BC", "BP", "BR", "BN", "BNS", "BNC", "BNP", "S", "C", "P", "N",
    "BSS", "BCC", "BPP", "BPC", "SS", "CC", "T", "E",
)
# fmt: on
"""Products that sizes consist of; the empty product is a constant."""

ROUNDED_AXES = frozenset("RTUE")
"""Axes that differ from others by rounding. At points of round lengths the difference is 0, and
would be a formula of anything that is something else at a single point: sums with them only add.
"""

MAX_TERMS = 3  # B x (P + C - 1) has two terms; (S - 1) squared has three
MAX_APPROXIMATE_TERMS = 2  # limit without an exact sum: long sums go astray between examples
EXACT = 1e-9
"""Relative error within which two values are equal. Examples are integers below 2**53: an exact sum
misses them by rounding alone, some 1e-15 (in a survey of a 0.5B model the others missed by 1e-6 and
more). A sum is closer than another only if its error is smaller by this share as well: of equally
close ones the first stays, which has commoner terms, whatever rounding makes of their last digits.
"""
MIN_EXAMPLES_TO_FIT = 4
"""Number of examples from which the closest short sum beats the closest known one."""


@dataclass(frozen=True)
class Term:
    """A product of axes; or a sum of products up to a cap, the amount of a loop's iteration."""

    products: tuple[tuple[str, float], ...]  # axes and coefficient of each
    cap: float | None = None
    rounds: bool = False  # count iterations, ceil(sum / cap), instead of the amount, min(sum, cap)
    factor: str = ""  # axes whose product multiplies the value

    @property
    def is_rounded(self) -> bool:
        return any(ROUNDED_AXES.intersection(product) for product, _ in self.products)

    def values(self, axes: Floats) -> Floats:
        """Return t(x), from a row of AXES for each point."""
        total = np.zeros(len(axes))
        for product, coefficient in self.products:
            total += coefficient * _product(axes, product)
        if self.cap is not None:
            total = self._capped(total, self.cap)
        return total * _product(axes, self.factor)

    def _capped(self, total: Floats, cap: float) -> Floats:
        if self.rounds:
            return np.ceil(total / cap)
        return np.minimum(total, cap)


def single(product: str) -> Term:
    """Return a product of axes as a term."""
    return Term(((product, 1.0),))


LOOP_ROWS = (
    Term((("BC", 1.0),)),
    Term((("BS", 1.0),)),
    Term((("BS", 1.0), ("B", -1.0))),
    Term((("T", 1.0),)),
    Term((("U", 1.0),)),
)
"""Rows of a micro-batch that loops and kernels work through up to a limit; U: of pairs."""


class ShortSums(NamedTuple):
    """Formulas of examples, a row for each."""

    coefficients: Floats  # of the basis' terms
    is_exact: Booleans  # True for rows whose examples are reproduced


@dataclass(frozen=True)
class Basis:
    """Terms that are distinguishable over the points of a space."""

    terms: tuple[Term, ...]

    @classmethod
    def of(cls, points: Floats) -> Basis:
        """Return the products, of the axes that vary in them: those of single rows lack B."""
        ranges = np.ptp(_axes(points), axis=0)
        varying = set()
        for axis, axis_range in zip(AXES, ranges, strict=True):
            if axis_range > 0:
                varying.add(axis)

        products: dict[str, None] = {}
        for product in COMMONEST_FIRST:
            varying_axes = filter(varying.__contains__, product)
            products["".join(varying_axes)] = None
        return cls(tuple(map(single, products)))

    def values(self, points: Floats) -> Floats:
        """Return A: a row for each point, a column for each term."""
        axes = _axes(points)
        matrix = self._zeros(points)
        for column, term in enumerate(self.terms):
            matrix[:, column] = term.values(axes)
        return matrix

    def _zeros(self, rows: Floats) -> Floats:
        """Return a column for each term, with as many rows as these."""
        return np.zeros((len(rows), len(self.terms)))

    # Bases of several families.

    def joined(self, further: Basis) -> Basis:
        terms = dict.fromkeys(self.terms + further.terms)
        return Basis(tuple(terms))

    def widened(self, coefficients: Floats, wider: Basis) -> Floats:
        """Return the coefficients (terms last) in a basis that contains these terms."""
        leading = coefficients.shape[:-1]
        widened = np.zeros((*leading, len(wider.terms)))
        for column, term in enumerate(self.terms):
            wider_column = wider.terms.index(term)
            widened[..., wider_column] = coefficients[..., column]
        return widened

    # Fitting. Examples are rows with a column for each point.

    def fit(self, points: Floats, examples: Floats) -> ShortSums:
        """Return the shortest exact sum of each row of examples, or else the closest one."""
        matrix = self.values(points)
        sums = self._exact_sums(matrix, examples)
        inexact = ~sums.is_exact
        if inexact.any():
            sums.coefficients[inexact] = self._closest_sums(matrix, examples[inexact])
        return sums

    def _exact_sums(self, matrix: Floats, examples: Floats) -> ShortSums:
        """Return the shortest exact sum of each row that has one."""
        coefficients = self._zeros(examples)
        is_exact = np.zeros(len(examples), dtype=bool)
        largest = np.abs(examples).max(axis=1)
        tolerances = EXACT * np.maximum(1.0, largest)
        # As many terms as points reproduce anything.
        max_terms = min(MAX_TERMS, len(matrix) - 1)
        for terms in self._short_sums(max_terms):
            unsolved = np.flatnonzero(~is_exact)
            if not len(unsolved):
                break
            solved, errors = solve(matrix[:, terms], examples[unsolved].T)
            is_solved = (errors <= tolerances[unsolved]) & self._may_be(terms, solved)
            rows = unsolved[is_solved]
            coefficients[rows[:, np.newaxis], terms] = solved[is_solved]
            is_exact[rows] = True
        return ShortSums(coefficients, is_exact)

    def _closest_sums(self, matrix: Floats, examples: Floats) -> Floats:
        """Return the sum of each row with the least error at its worst example."""
        coefficients = self._zeros(examples)
        least_errors = np.full(len(examples), np.inf)
        for terms in self._short_sums(MAX_APPROXIMATE_TERMS):
            solved, errors = solve(matrix[:, terms], examples.T)
            is_closer: Booleans = errors < least_errors * (1 - EXACT)
            is_allowed = self._may_be(terms, solved)
            rows = np.flatnonzero(is_closer & is_allowed)
            coefficients[rows] = 0.0
            coefficients[rows[:, np.newaxis], terms] = solved[rows]
            least_errors[rows] = errors[rows]
        return coefficients

    def _may_be(self, terms: Sequence[int], coefficients: Floats) -> Booleans:
        """Return False for sums (rows of coefficients) that subtract a rounded amount."""
        if not any(self.terms[column].is_rounded for column in terms):
            return np.ones(len(coefficients), dtype=bool)
        only_adds: Booleans = np.all(coefficients >= 0, axis=1)
        return only_adds

    def _short_sums(self, max_terms: int) -> Iterator[list[int]]:
        columns = range(len(self.terms))
        return short_sums(columns, max_terms)

    # Caps.

    def with_caps(self, points: Floats, examples: Floats) -> Basis:
        """Add capped sums: of rows that reach their maximum several times."""
        matrix = self.values(points)
        terms = list(self.terms)
        for values in np.abs(examples):
            capped = self._capped_sum(points, matrix, values)
            is_new = capped not in terms
            if capped is not None and is_new:
                terms.append(capped)
        return Basis(tuple(terms))

    def _capped_sum(
        self,
        points: Floats,
        matrix: Floats,
        values: Floats,
    ) -> Term | None:
        """Return the sum that equals the values below the cap and exceeds it at the others."""
        cap = values.max()
        least_full = cap * (1 - EXACT)
        is_full = values >= least_full
        amount = _capped_amount(points, values, is_full)
        if amount is not None:
            return amount
        if is_full.sum() < 2:
            return None
        full = matrix[is_full]
        below = matrix[~is_full]
        values_below = values[~is_full]
        max_terms = min(MAX_APPROXIMATE_TERMS, len(below) - 1)
        for terms in self._short_sums(max_terms):
            coefficients, error = solve(below[:, terms], values_below)
            uncapped = full[:, terms] @ coefficients
            reaches_cap = (uncapped >= least_full).all()
            if error <= EXACT * cap and reaches_cap:
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
        for column, coefficient in zip(terms, coefficients, strict=True):
            term = self.terms[column]
            axes, _ = term.products[0]
            share = float(coefficient) / unit
            products.append((axes, round(share, 9)))
        cap_in_units = float(cap) / unit
        return Term(tuple(products), cap=round(cap_in_units, 6))


def _capped_amount(
    points: Floats,
    values: Floats,
    is_full: Booleans,
) -> Term | None:
    """Return the rows that the values are in proportion to below their cap, which they reach at
    the other points: whole bytes of each row, and a whole number of rows at most.

    One example below the cap is enough: rows of another kind would not be whole.
    """
    if is_full.all() or not values.all():
        return None
    axes = _axes(points)
    for amount in LOOP_ROWS:
        rows = amount.values(axes)
        row_bytes = values[~is_full] / rows[~is_full]
        most_rows = values.max() / row_bytes[0]
        conditions = (
            np.ptp(row_bytes) <= EXACT * row_bytes[0],
            _is_whole(row_bytes[0]),
            _is_whole(most_rows),
            rows[is_full].min() >= most_rows * (1 - EXACT),
            rows.max() > most_rows * (1 + EXACT),
        )
        if all(conditions):
            cap = round(float(most_rows))
            return replace(amount, cap=cap)
    return None


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) <= EXACT * value


def _no_coefficients() -> Floats:
    return np.zeros((0, 0))


@dataclass(frozen=True, kw_only=True)
class KnownFormulas:
    """Formulas found in one family, so that other families of the same model need fewer examples.

    The same tensors occur with and without recomputation and with any engine: a size that equals a
    known formula at every example is that formula. A trace at the far corner checks this.
    """

    basis: Basis = Basis(())
    coefficients: Floats = field(default_factory=_no_coefficients)  # a row per formula

    def fit(self, points: Floats, examples: Floats) -> tuple[KnownFormulas, Floats, Booleans]:
        """Express each row (a column per point) as a known formula or the shortest sum.

        Return the known formulas with those of these rows, the rows' coefficients in their basis,
        and True for each row that is exact.
        """
        # 1. Rows that equal a known formula, and the others.
        matrix = self.basis.values(points)
        known_values = self.coefficients @ matrix.T
        formula_of_row = _equal_rows(examples, known_values)
        is_new = formula_of_row < 0
        new_basis, new_sums = _fit_new(points, examples[is_new])

        # 2. Both in one basis.
        basis = self.basis.joined(new_basis)
        known_rows = self.basis.widened(self.coefficients, basis)
        equal_formulas = formula_of_row[~is_new]
        coefficients = np.zeros((len(examples), len(basis.terms)))
        coefficients[~is_new] = known_rows[equal_formulas]
        coefficients[is_new] = new_basis.widened(new_sums.coefficients, basis)
        is_exact = np.ones(len(examples), dtype=bool)
        is_exact[is_new] = new_sums.is_exact

        # 3. For inexact rows with few examples, the closest known formula.
        if len(points) < MIN_EXAMPLES_TO_FIT and len(known_rows):
            for row in np.flatnonzero(~is_exact):
                differences = np.abs(known_values - examples[row])
                errors = differences.max(axis=1)
                closest = errors.argmin()
                coefficients[row] = known_rows[closest]

        # 4. The known formulas of the next family.
        formulas = np.concatenate([known_rows, coefficients[is_new]])
        distinct = np.unique(formulas, axis=0)
        next_formulas = KnownFormulas(basis=basis, coefficients=distinct)
        return next_formulas, coefficients, is_exact


def _equal_rows(examples: Floats, known_values: Floats) -> Integers:
    """Return the known formula that each row of examples equals; -1 for none."""
    formulas: dict[tuple[int, ...], int] = {}
    for formula, values in enumerate(_rounded(known_values)):
        formulas.setdefault(tuple(values), formula)
    rows = []
    for values in _rounded(examples):
        formula = formulas.get(tuple(values), -1)
        rows.append(formula)
    return integers(rows)


def _rounded(values: Floats) -> list[list[int]]:
    integers = np.rint(values).astype(np.int64)
    rounded: list[list[int]] = integers.tolist()
    return rounded


def _fit_new(points: Floats, examples: Floats) -> tuple[Basis, ShortSums]:
    """Return a basis and the rows' formulas in it; with caps only if needed."""
    basis = Basis.of(points)
    sums = basis.fit(points, examples)
    inexact = ~sums.is_exact
    if inexact.any():
        basis = basis.with_caps(points, examples[inexact])
        sums = basis.fit(points, examples)
    return basis, sums


def short_sums(terms: Sequence[int], max_terms: int) -> Iterator[list[int]]:
    """Yield sets of terms, small ones first."""
    for count in range(1, max_terms + 1):
        for combination in itertools.combinations(terms, count):
            yield list(combination)


def solve(matrix: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Return coefficients of each target (a column) and its largest error; infinite if
    rank-deficient.

    Each column of A is divided by its largest value, and its coefficient as well. Else BSS, with
    values a million times those of B, would decide the scale of `rcond`: `lstsq` takes what is
    below this share of the largest singular value for dependent, and loses as many digits.
    """
    scale = np.abs(matrix).max(axis=0)
    scaled = matrix / scale
    solved, _, rank, _ = np.linalg.lstsq(scaled, targets, rcond=1e-10)
    if rank < matrix.shape[1]:
        no_sum = np.full(targets.shape[1:], np.inf)
        return solved.T, no_sum
    differences = scaled @ solved - targets
    errors = np.abs(differences).max(axis=0)
    return solved.T / scale, errors


def _axes(points: Floats) -> Floats:
    """Return a column for each of AXES."""
    batch, prompt, completion, _ = points.T
    length = prompt + completion
    tiles = np.ceil(length / TILE)
    rows = np.ceil(batch * length / TOKEN_ROWS)
    paired_rows = np.ceil(2 * batch * length / TOKEN_ROWS)
    segments = batch * length // SEGMENT_ROWS
    rounded_rows = [rows * TOKEN_ROWS, paired_rows * TOKEN_ROWS, segments]
    return np.column_stack([points, length, tiles * TILE, *rounded_rows])


def _product(axes: Floats, product: str) -> Floats:
    columns = []
    for axis in product:
        column = AXES.index(axis)
        columns.append(axes[:, column])
    values = np.prod(columns, axis=0, initial=1.0)
    return np.asarray(values, dtype=np.float64)
