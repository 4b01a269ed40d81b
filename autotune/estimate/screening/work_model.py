"""Counted work (operations, moved bytes, kernel launches) of a step at any point, at full depth.

A count w of a phase in a model of L layers is w_out(x) + w_in(x, L): outside of the layers it is
constant in the depth, inside it is proportional to L. Both are measured on the short model of L0
layers and are formulas of the point, as sizes are (`formulas`), with more terms to choose from and
fewer examples. At full depth, L = L0 + c p:

    w(x) = w_out(x) + (1 + c p / L0) w_in(x) + c delta
    delta = w of the longer model at x_1 - w of the short one - (p / L0) w_in(x_1)

delta is the work of a group of layers that is counted outside of them: the optimizer's.

Phases that generate are counted for the whole batch, micro-step after micro-step, so all their
terms contain the number of micro-steps N. The training passes are counted for the same few
micro-steps, whatever N is. Work is never negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Trace, Work
from autotune.estimate.screening.formulas import EXACT, Basis, Term, short_sums, single, solve
from autotune.estimate.screening.points import Floats, Sample, rows_of
from autotune.estimate.screening.repetition import LayerRepetition
from autotune.estimate.throughput import BATCH_PHASES

MOVED_BYTES, KERNELS = "moved_bytes", "kernels"
NOT_OPERATIONS = (MOVED_BYTES, KERNELS)
"""Quantities besides operations, which are counted by dtype."""

PASS_AXES = ("", "BS", "S", "BSS", "BC", "B", "C", "BCC")
"""Terms of one pass: weights, hidden states, positions, attention, logits."""

SPLIT_AXES = ("N", "BNS", "BNC")  # terms of splitting a generated batch into micro-batches
BATCH_AXES = ("NS", "BNSS", "BN", "NC", "BNCC")  # the others of PASS_AXES, once per micro-step
CONSTANT = single("")
MAX_TERMS = 5  # the reference family is traced at one point more than that


class Count(NamedTuple):
    """What is counted."""

    phase: Phase
    quantity: str  # a dtype's operations, or one of NOT_OPERATIONS


class CountShare(NamedTuple):
    """The share of a count inside of the layers, w_in, or outside of them, w_out."""

    in_layers: bool
    total: Count


Formulas = dict[CountShare, Floats]  # coefficients of the short model's counts


@dataclass(frozen=True, kw_only=True)
class WorkModel:
    """Work at any point, in columns: coefficients of the basis' terms."""

    basis: Basis
    counts: tuple[Count, ...]
    coefficients: Floats  # a row for each of `counts`: the full model's
    short_shares: tuple[CountShare, ...]
    short_coefficients: Floats  # a row for each of `short_shares`: formulas for other families

    def work_at(self, points: Floats) -> list[tuple[Work, ...]]:
        """Return the work of each phase, at each point."""
        matrix = self.basis.values(points)
        values: dict[Phase, dict[str, Floats]] = {}
        for count, coefficients in zip(self.counts, self.coefficients, strict=True):
            by_quantity = values.setdefault(count.phase, {})
            by_quantity[count.quantity] = np.maximum(0.0, matrix @ coefficients)

        works = []
        for row in range(len(points)):
            phases = [_work(phase, columns, row) for phase, columns in values.items()]
            works.append(tuple(phases))
        return works

    def formulas_in(self, basis: Basis) -> Formulas:
        """Return the short model's formulas in a wider basis."""
        rows = self.basis.widened(self.short_coefficients, basis)
        return dict(zip(self.short_shares, rows, strict=True))


def _work(
    phase: Phase,
    columns: Mapping[str, Floats],
    row: int,
) -> Work:
    values = {quantity: float(column[row]) for quantity, column in columns.items()}
    return Work(
        phase=phase,
        moved_bytes=values.pop(MOVED_BYTES),
        kernels=round(values.pop(KERNELS)),
        flops=values,
    )


def fit_work(
    samples: Sequence[Sample],
    longer: Trace | None,
    check: Sample | None,
    repetition: LayerRepetition,
    reference: WorkModel | None,
    size_terms: Iterable[Term],
) -> WorkModel:
    """Fit the work of traces of a short model at several points, and of a longer one at the first
    of them. Capped `size_terms` reveal loops that work piece by piece.
    """
    measured = list(samples) if check is None else [*samples, check]
    points = rows_of([sample.point for sample in measured])
    counts = _counts_of(samples)

    # 1. w_in(x) and w_out(x): formulas of the reference family again, or new ones.
    basis = _basis_of(points, size_terms, () if reference is None else reference.basis.terms)
    known_formulas = {} if reference is None else reference.formulas_in(basis)
    matrix = basis.values(points)
    formulas = dict(known_formulas)
    for share, values in _examples(counts, measured).items():
        formulas[share] = _formula(share, basis, matrix, values, known_formulas)

    # 2. w(L, x).
    coefficients = []
    layers_ratio = 1 + repetition.copies * repetition.period / max(1, repetition.layers)
    for count in counts:
        inside = formulas[CountShare(True, count)]
        outside = formulas[CountShare(False, count)]
        full = outside + layers_ratio * inside
        if longer is not None:
            delta = _delta(samples[0].trace, longer, count, repetition)
            full[basis.terms.index(CONSTANT)] += repetition.copies * delta
        coefficients.append(full)
    return WorkModel(
        basis=basis,
        counts=counts,
        coefficients=_stacked(coefficients, basis),
        short_shares=tuple(formulas),
        short_coefficients=_stacked(formulas.values(), basis),
    )


def _counts_of(samples: Sequence[Sample]) -> tuple[Count, ...]:
    counts: dict[Count, None] = {}
    for sample in samples:
        for work in sample.trace.work:
            for quantity in (*work.flops, *NOT_OPERATIONS):
                counts[Count(work.phase, quantity)] = None
    return tuple(counts)


def _examples(counts: Sequence[Count], samples: Sequence[Sample]) -> Formulas:
    """Return the values of w_in and w_out at the samples' points."""
    inside: Formulas = {}
    outside: Formulas = {}
    for count in counts:
        in_layers = np.array([_inside(sample.trace, count) for sample in samples])
        totals = np.array([_total(sample.trace, count) for sample in samples])
        inside[CountShare(True, count)] = in_layers
        outside[CountShare(False, count)] = totals - in_layers
    return {**inside, **outside}


def _inside(trace: Trace, count: Count) -> float:
    """Return what is counted inside the layers."""
    inside = 0.0
    for work in trace.work:
        if work.phase == count.phase:
            inside += work.in_layers.get(count.quantity, 0.0)
    return inside


def _total(trace: Trace, count: Count) -> float:
    total = 0.0
    for work in trace.work:
        if work.phase != count.phase:
            continue
        if count.quantity in NOT_OPERATIONS:
            total += getattr(work, count.quantity)
        else:
            total += work.flops.get(count.quantity, 0.0)
    return total


def _delta(
    short: Trace,
    longer: Trace,
    count: Count,
    repetition: LayerRepetition,
) -> float:
    """Return a group's work that is not counted inside the layers."""
    expected = _inside(short, count) * repetition.period / repetition.layers
    return _total(longer, count) - _total(short, count) - expected


def _stacked(rows: Iterable[Floats], basis: Basis) -> Floats:
    return np.array([*rows]).reshape(-1, len(basis.terms))


# Terms.


def _basis_of(
    points: Floats,
    size_terms: Iterable[Term],
    known_terms: Sequence[Term],
) -> Basis:
    """Return the constant, the known terms, and those that vary over these points."""
    terms = [single(axes) for axes in (*PASS_AXES, *SPLIT_AXES, *BATCH_AXES)]
    for loop in size_terms:
        if loop.cap:
            for rounds, factor in itertools.product((True, False), ("", "N")):
                terms.append(replace(loop, rounds=rounds, factor=factor))
    columns = Basis(tuple(terms)).values(points).T
    varying = [term for term, column in zip(terms, columns, strict=True) if np.ptp(column) > 0]
    return Basis(tuple(dict.fromkeys((CONSTANT, *known_terms, *varying))))


def _possible_terms(phase: Phase, basis: Basis) -> tuple[list[int], list[int]]:
    """Return the terms that can dominate this phase's counts, and those of small amounts."""
    is_batch_phase = phase in BATCH_PHASES
    main, small = [], []
    for place, term in enumerate(basis.terms):
        axes = term.factor if term.cap else term.products[0][0]
        if term == CONSTANT or ("N" in axes) == is_batch_phase:
            main.append(place)
        elif axes in SPLIT_AXES:
            small.append(place)
    return main, small


# Formulas. `values` are a count's at the points of the matrix' rows.


def _formula(
    share: CountShare,
    basis: Basis,
    matrix: Floats,
    values: Floats,
    known_formulas: Formulas,
) -> Floats:
    """Return a known formula that matches, a short sum, or the reference's rescaled."""
    # 1. A known formula: preferably that of the same count.
    same = known_formulas.get(share)
    candidates = list(known_formulas.values())
    if same is not None:
        candidates.insert(0, same)
    tolerance = EXACT * max(1.0, values.max())
    for coefficients in candidates:
        if np.abs(matrix @ coefficients - values).max() <= tolerance:
            return coefficients

    # 2. The shortest exact sum.
    shortest, error = _shortest(matrix, values, *_possible_terms(share.total.phase, basis))
    if error <= EXACT:
        return shortest

    # 3. The same count's formula, rescaled.
    if same is not None and (matrix @ same > 0).all():
        return _rescaled(matrix, values, same)
    return shortest


def _shortest(
    matrix: Floats,
    values: Floats,
    main: Sequence[int],
    small: Sequence[int],
) -> tuple[Floats, float]:
    """Return the shortest exact sum and its relative error.

    Without one: the closest sum of main terms with coefficients >= 0.
    """
    best = np.zeros(matrix.shape[1])
    least_error = np.inf
    if not values.any():
        return best, 0.0
    small_terms = frozenset(small)
    weights = 1 / np.maximum(np.abs(values), EXACT * np.abs(values).max())
    weighted = matrix * weights[:, np.newaxis]
    target = values * weights
    for terms in short_sums([*main, *small], max(1, min(MAX_TERMS, len(values) - 1))):
        coefficients, error = solve(weighted[:, terms], target)
        is_exact = error <= EXACT
        is_closer = error < least_error * (1 - EXACT)
        if is_exact or (is_closer and coefficients.min() >= 0 and small_terms.isdisjoint(terms)):
            best = np.zeros(matrix.shape[1])
            least_error = float(error)
            best[terms] = coefficients
        if is_exact:
            break
    return best, least_error


def _rescaled(
    matrix: Floats,
    values: Floats,
    formula: Floats,
) -> Floats:
    """Return the known sum with coefficients rescaled by the least change (minimum norm)."""
    terms = np.flatnonzero(formula)
    known_values = matrix @ formula
    shares = matrix[:, terms] * formula[terms] / known_values[:, np.newaxis]
    ratio = values / known_values
    median = float(np.median(ratio))
    change = np.linalg.lstsq(shares, ratio - median, rcond=1e-6)[0]
    rescaled = np.zeros_like(formula)
    rescaled[terms] = formula[terms] * np.maximum(0.0, median + change)
    return rescaled
