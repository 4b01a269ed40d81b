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
    """The share of a count inside of the layers, or outside of them."""

    in_layers: bool
    total: Count


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
        return [
            tuple(_work(phase, by_quantity, row) for phase, by_quantity in values.items())
            for row in range(len(points))
        ]


def _work(
    phase: Phase,
    values: Mapping[str, Floats],
    row: int,
) -> Work:
    flops = {
        quantity: float(column[row])
        for quantity, column in values.items()
        if quantity not in NOT_OPERATIONS
    }
    return Work(
        phase=phase,
        flops=flops,
        moved_bytes=float(values[MOVED_BYTES][row]),
        kernels=round(float(values[KERNELS][row])),
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
    first = samples[0].trace
    counts = _counts_of(samples)
    # 1. Examples of w_in and w_out.
    examples: dict[CountShare, Floats] = {}
    for count in counts:
        inside = [_inside(sample.trace, count) for sample in measured]
        examples[CountShare(True, count)] = np.array(inside)
    for count in counts:
        totals = np.array([_total(sample.trace, count) for sample in measured])
        examples[CountShare(False, count)] = totals - examples[CountShare(True, count)]
    # 2. Formulas: those of the reference family again, or new ones.
    points = rows_of([sample.point for sample in measured])
    known_terms = () if reference is None else reference.basis.terms
    basis = _basis_of(points, size_terms, known_terms)
    known_formulas = {} if reference is None else _formulas_of(reference, basis)
    matrix = basis.values(points)
    short = dict(known_formulas)
    for share, row in examples.items():
        short[share] = _formula(share, basis, matrix, row, known_formulas)
    # 3. The full depth.
    coefficients = []
    layers_ratio = 1 + repetition.copies * repetition.period / max(1, repetition.layers)
    for count in counts:
        full = short[CountShare(False, count)] + layers_ratio * short[CountShare(True, count)]
        if longer is not None:  # delta: a group's work that is not counted inside layers
            expected = _inside(first, count) * repetition.period / repetition.layers
            delta = _total(longer, count) - _total(first, count) - expected
            full[basis.terms.index(CONSTANT)] += repetition.copies * delta
        coefficients.append(full)
    return WorkModel(
        basis=basis,
        counts=counts,
        coefficients=_stacked(coefficients, basis),
        short_shares=tuple(short),
        short_coefficients=_stacked(short.values(), basis),
    )


def _counts_of(samples: Sequence[Sample]) -> tuple[Count, ...]:
    counts: dict[Count, None] = {}
    for sample in samples:
        for work in sample.trace.work:
            for quantity in (*work.flops, *NOT_OPERATIONS):
                counts[Count(work.phase, quantity)] = None
    return tuple(counts)


def _formulas_of(model: WorkModel, basis: Basis) -> dict[CountShare, Floats]:
    """Return the short model's formulas in a wider basis."""
    rows = model.basis.widened(model.short_coefficients, basis)
    return dict(zip(model.short_shares, rows, strict=True))


def _stacked(rows: Iterable[Floats], basis: Basis) -> Floats:
    return np.array([*rows]).reshape(-1, len(basis.terms))


def _basis_of(
    points: Floats,
    size_terms: Iterable[Term],
    known_formulas: Sequence[Term],
) -> Basis:
    """Return the constant, the known terms, and those that vary over these points."""
    terms = [single(axes) for axes in (*PASS_AXES, *SPLIT_AXES, *BATCH_AXES)]
    for loop in size_terms:
        if loop.cap:
            for rounds in (True, False):
                terms += [replace(loop, rounds=rounds, factor=factor) for factor in ("", "N")]
    columns = Basis(tuple(terms)).values(points).T
    varying = [term for term, column in zip(terms, columns, strict=True) if np.ptp(column) > 0]
    return Basis(tuple(dict.fromkeys((CONSTANT, *known_formulas, *varying))))


def _formula(
    share: CountShare,
    basis: Basis,
    matrix: Floats,
    row: Floats,
    known_formulas: Mapping[CountShare, Floats],
) -> Floats:
    """Return a known formula that matches, a short sum, or the reference's rescaled."""
    # 1. A known formula: preferably that of the same count.
    same = known_formulas.get(share)
    candidates = list(known_formulas.values()) if same is None else [same, *known_formulas.values()]
    for coefficients in candidates:
        if np.abs(matrix @ coefficients - row).max() <= EXACT * max(1.0, row.max()):
            return coefficients
    # 2. The shortest exact sum.
    shortest, error = _shortest(matrix, row, *_possible_terms(share.total.phase, basis))
    if error <= EXACT:
        return shortest
    # 3. The same count's formula, rescaled.
    if same is not None and (matrix @ same > 0).all():
        return _rescaled(matrix, row, same)
    return shortest


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


def _shortest(
    matrix: Floats,
    row: Floats,
    main: Sequence[int],
    small: Sequence[int],
) -> tuple[Floats, float]:
    """Return the shortest exact sum and its relative error.

    Without one: the closest sum of main terms with coefficients >= 0.
    """
    best, least = np.zeros(matrix.shape[1]), np.inf
    if not row.any():
        return best, 0.0
    small_terms = frozenset(small)
    weights = 1 / np.maximum(np.abs(row), EXACT * np.abs(row).max())
    weighted, target = matrix * weights[:, None], row * weights
    for terms in short_sums([*main, *small], max(1, min(MAX_TERMS, len(row) - 1))):
        coefficients, error = solve(weighted[:, terms], target)
        is_exact = error <= EXACT
        is_closer = error < least * (1 - EXACT)
        if is_exact or (is_closer and coefficients.min() >= 0 and small_terms.isdisjoint(terms)):
            best, least = np.zeros(matrix.shape[1]), float(error)
            best[list(terms)] = coefficients
        if is_exact:
            break
    return best, least


def _rescaled(
    matrix: Floats,
    row: Floats,
    formula: Floats,
) -> Floats:
    """Return the known sum with coefficients rescaled by the least change (minimum norm)."""
    terms = np.flatnonzero(formula)
    values = matrix @ formula
    shares = matrix[:, terms] * formula[terms] / values[:, None]
    ratio = row / values
    median = float(np.median(ratio))
    change = np.linalg.lstsq(shares, ratio - median, rcond=1e-6)[0]
    rescaled = np.zeros_like(formula)
    rescaled[terms] = formula[terms] * np.maximum(0.0, median + change)
    return rescaled


def _total(trace: Trace, count: Count) -> float:
    total = 0.0
    for work in trace.work:
        if work.phase == count.phase:
            if count.quantity in NOT_OPERATIONS:
                total += float(getattr(work, count.quantity))
            else:
                total += work.flops.get(count.quantity, 0.0)
    return total


def _inside(trace: Trace, count: Count) -> float:
    """Return what is counted inside the layers."""
    works = [work for work in trace.work if work.phase == count.phase]
    return sum(work.in_layers.get(count.quantity, 0.0) for work in works)
