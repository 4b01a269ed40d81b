"""Counted work (operations, moved bytes, kernel launches) of a step at any point, in any number of
layers.

Work is a sum of products as sizes are, with more terms to choose from and fewer examples. Phases
that generate are counted for the whole batch, micro-step after micro-step, so all their terms
contain the number of micro-steps N. The training passes are counted for the same few micro-steps,
whatever N is. Work is never negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from autotune.core.measurement import Phase
from autotune.core.trace import Trace, Work
from autotune.estimate.screening.blocks import Floats, LayerRepetition, Sample, rows_of
from autotune.estimate.screening.formulas import EXACT, Basis, Term, short_sums, solve
from autotune.estimate.throughput import BATCH_PHASES

Count: TypeAlias = tuple[Phase, str]  # a phase, and the quantity counted in it
Key: TypeAlias = tuple[bool, Count]  # inside the layers (True) or outside of them
OTHER = ("moved_bytes", "kernels")  # quantities besides operations, which are counted by dtype
PASS_AXES = ("", "BS", "S", "BSS", "BC", "B", "C", "BCC")
"""Terms of one pass: weights, hidden states, positions, attention, logits."""

SPLIT_AXES = ("N", "BNS", "BNC")  # terms of splitting a generated batch into micro-batches
MAX_TERMS = 5  # the reference family is traced at one point more than that


@dataclass(frozen=True, kw_only=True)
class WorkModel:
    """Work as coefficients of the basis' terms."""

    basis: Basis
    short: Mapping[Key, Floats]  # counts of the short model, inside and outside of the layers
    counts: Mapping[Count, Floats]  # counts of the full model

    def at(self, points: Floats) -> list[tuple[Work, ...]]:
        values = self.basis.values(points)
        found = {name: np.maximum(0.0, values @ row) for name, row in self.counts.items()}

        def work(phase: Phase, row: int) -> Work:
            flops = {
                what: float(counts[row])
                for (of, what), counts in found.items()
                if of == phase and what not in OTHER
            }
            moved, kernels = (float(found[phase, what][row]) for what in OTHER)
            return Work(phase=phase, flops=flops, moved_bytes=moved, kernels=round(kernels))

        phases = list(dict.fromkeys(phase for phase, _ in self.counts))
        return [tuple(work(phase, row) for phase in phases) for row in range(len(points))]


def fit_work(
    samples: Sequence[Sample],
    longer: Trace | None,
    check: Sample | None,
    repetition: LayerRepetition,
    reference: WorkModel | None,
    size_terms: Iterable[Term],
) -> WorkModel:
    """Fit the work of traces of a short model at several points, and of a longer one at the first
    of them.

    Work outside the layers is constant in the depth, inside the layers it grows with them; an
    optimizer's grows by the difference between `longer` and the short model. Capped `size_terms`
    reveal loops that work piece by piece.
    """
    known = reference or WorkModel(basis=Basis(()), short={}, counts={})
    every = (*samples, *(() if check is None else (check,)))
    traces = [sample.trace for sample in samples]
    names = list(
        dict.fromkeys(
            (work.phase, what)
            for one in traces
            for work in one.work
            for what in (*work.flops, *OTHER)
        )
    )
    # 1. Counts at the points, inside and outside of the layers.
    points = rows_of([sample.point for sample in every])
    rows: dict[Key, Floats] = {
        (True, name): np.array([_inside(one.trace, *name) for one in every]) for name in names
    }
    for name in names:
        rows[False, name] = np.array([_total(one.trace, *name) for one in every]) - rows[True, name]
    # 2. Formulas: those of the reference family again, or new ones.
    basis = _basis_of(points, size_terms, known.basis)
    at = basis.values(points)
    old = {key: known.basis.widened(row, basis) for key, row in known.short.items()}
    short = {**old, **{key: _formula(key, basis, at, row, old) for key, row in rows.items()}}
    # 3. The full depth.
    times = 1 + repetition.copies * repetition.period / max(1, repetition.layers)
    counts = {name: short[False, name] + times * short[True, name] for name in names}
    if longer is not None:  # a group's work that is not counted inside layers
        for name in names:
            expected = _inside(traces[0], *name) * repetition.period / repetition.layers
            counts[name][0] += repetition.copies * (
                _total(longer, *name) - _total(traces[0], *name) - expected
            )
    return WorkModel(basis=basis, short=short, counts=counts)


def _basis_of(points: Floats, size_terms: Iterable[Term], known: Basis) -> Basis:
    """Return the constant, the known terms, and those that vary over these points."""
    axes = (
        *PASS_AXES,
        *SPLIT_AXES,
        *(axes + "N" for axes in PASS_AXES if axes + "N" not in SPLIT_AXES),
    )
    products = dict.fromkeys("".join(sorted(one, key="BNSC".index)) for one in axes)
    plain = [Term(((one, 1.0),)) for one in products]
    loops = [
        replace(term, rounds=rounds, each=each)
        for term in size_terms
        if term.cap
        for rounds in (True, False)
        for each in ("", "N")
    ]
    at = Basis((*plain, *loops)).values(points)
    moving = [term for term, row in zip((*plain, *loops), at.T, strict=True) if np.ptp(row) > 0]
    return Basis(tuple(dict.fromkeys((Term((("", 1.0),)), *known.terms, *moving))))


def _formula(
    key: Key, basis: Basis, at: Floats, row: Floats, known: Mapping[Key, Floats]
) -> Floats:
    """Return a known formula that matches, a short sum, or the reference's rescaled."""
    like = known.get(key)
    candidates: list[Floats] = [*(() if like is None else (like,)), *known.values()]
    for one in candidates:
        if np.abs(at @ one - row).max() <= EXACT * max(1.0, row.max()):
            return one
    # Terms that can dominate this phase's counts, and those of small amounts.
    of_batch, main, small = key[1][0] in BATCH_PHASES, [0], []
    for place, term in enumerate(basis.terms[1:], 1):
        axes = term.each if term.cap else term.products[0][0]
        if ("N" in axes) == of_batch:
            main.append(place)
        elif axes in SPLIT_AXES:
            small.append(place)
    found, error = _shortest(at, row, main, small)
    if error <= EXACT or like is None or not (at @ like > 0).all():
        return found
    return _rescaled(at, row, like)


def _shortest(at: Floats, row: Floats, main: list[int], small: list[int]) -> tuple[Floats, float]:
    """Return the shortest exact sum and its relative error.

    Without one: the closest sum of main terms with coefficients >= 0.
    """
    best, least, rare = np.zeros(at.shape[1]), np.inf, frozenset(small)
    if not row.any():
        return best, 0.0
    weights = 1 / np.maximum(np.abs(row), EXACT * np.abs(row).max())
    weighted, target = at * weights[:, None], row * weights
    for several in short_sums([*main, *small], max(1, min(MAX_TERMS, len(row) - 1))):
        solved, error = solve(weighted[:, several], target)
        exact = error <= EXACT
        if exact or (
            error < least * (1 - EXACT) and solved.min() >= 0 and rare.isdisjoint(several)
        ):
            best, least = np.zeros(at.shape[1]), float(error)
            best[list(several)] = solved
        if exact:
            break
    return best, float(least)


def _rescaled(at: Floats, row: Floats, like: Floats) -> Floats:
    """Return the known sum with coefficients rescaled by the least change (minimum norm)."""
    terms = np.flatnonzero(like)
    share = at[:, terms] * like[terms] / (at @ like)[:, None]
    ratio = row / (at @ like)
    median = float(np.median(ratio))
    change = np.linalg.lstsq(share, ratio - median, rcond=1e-6)[0]
    found = np.zeros_like(like)
    found[terms] = like[terms] * np.maximum(0.0, median + change)
    return found


def _total(trace: Trace, phase: Phase, what: str) -> float:
    own = [work for work in trace.work if work.phase == phase]
    return sum(
        float(getattr(work, what)) if what in OTHER else work.flops.get(what, 0.0) for work in own
    )


def _inside(trace: Trace, phase: Phase, what: str) -> float:
    return sum(work.in_layers.get(what, 0.0) for work in trace.work if work.phase == phase)
