"""Sizes as sums of products of batch and lengths: found from a few examples, exactly.

A tensor's size is a product of its dimensions, so over batch B, prompt P, completion C and micro-steps per generation N it is
a sum of very few of the terms below. Of all such sums the shortest one that gives every example exactly is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

AXES = "BPCNSR"
"""What a point gives (batch, prompt, completion, micro-steps), S = P + C, and R = S rounded up to a kernel's tile."""

TILE = 128
"""Rows that flash attention's backward rounds sequences up to in its accumulator of queries' gradients: FlashAttention's
`flash_api.cpp`, `seqlen_q_rounded = round_multiple(seqlen_q, 128)`."""

COMMONEST_FIRST = (
    "", "B", "BS", "BC", "BP", "BR", "BN", "BNS", "BNC", "BNP", "S", "C", "P", "N", "BSS", "BCC", "BPP", "BPC", "SS", "CC",
)  # fmt: skip

MOST_TERMS = 3
"""A product like B x (P + C - 1) has two; (S - 1) squared has three."""

CLOSEST_TERMS = 2
"""Where no sum is exact, the closest short one: long ones go astray between examples."""

EXACT = 1e-9
"""Relative: examples are whole numbers below 2**53."""


@dataclass(frozen=True)
class Term:
    """One product of the axes; or a sum of such, up to a cap: a loop takes so much at a time and no more."""

    products: tuple[tuple[str, float], ...]
    cap: float | None = None
    rounds: bool = False
    """Rather than what the loop takes at a time: how often it goes round."""

    each: str = ""
    """So much for each of these axes' product."""

    def values(self, whole: Floats) -> Floats:
        total = np.zeros(len(whole))
        for axes, times in self.products:
            total = total + times * _product(whole, axes)
        if self.cap is not None:
            total = np.ceil(total / self.cap) if self.rounds else np.minimum(total, self.cap)
        return total * _product(whole, self.each)


@dataclass(frozen=True)
class Basis:
    """The terms that can be told apart where the points of a space lie."""

    terms: tuple[Term, ...]

    @classmethod
    def of(cls, points: Floats) -> Basis:
        """What never moves is no variable."""
        whole = _whole(points)
        moving = {axis for place, axis in enumerate(AXES) if np.ptp(whole[:, place]) > 0}
        return cls(tuple(Term(((axes, 1.0),)) for axes in COMMONEST_FIRST if set(axes) <= moving))

    def values(self, points: Floats) -> Floats:
        """Each term at each point."""
        whole = _whole(points)
        return np.stack([term.values(whole) for term in self.terms], axis=1)

    def with_caps(self, points: Floats, examples: Floats) -> Basis:
        """With the capped sums that these rows show: several equal at the top, the others below it a plain sum."""
        found: dict[Term, None] = {}
        for row in np.abs(examples):
            full = row >= row.max() * (1 - EXACT)
            if full.sum() >= 2 and (term := self._capped(points, row, full)) is not None:
                found[term] = None
        return replace(self, terms=(*self.terms, *found))

    def _capped(self, points: Floats, row: Floats, full: Flags) -> Term | None:
        """The sum that the row is where it is not full, if it would be above the cap where it is."""
        at, top = self.values(points), row.max()
        for terms in self._sums(min(CLOSEST_TERMS, int((~full).sum()) - 1)):
            here = at[:, terms]
            solved, off = _solve(here[~full], row[np.newaxis, ~full])
            if off[0] <= EXACT * top and (here[full] @ solved[0] >= top * (1 - EXACT)).all():
                unit = float(solved[0].max())
                axes = [self.terms[term].products[0][0] for term in terms]
                products = zip(axes, (round(float(times) / unit, 9) for times in solved[0]), strict=True)
                return Term(tuple(products), cap=round(float(top) / unit, 6))
        return None

    def fit(self, points: Floats, examples: Floats) -> tuple[Floats, Flags]:
        """For each row of examples (one column per point) its coefficients, and whether they give it exactly."""
        at = self.values(points)
        coefficients = np.zeros((len(examples), len(self.terms)))
        left = np.arange(len(examples))
        for terms in self._sums(min(MOST_TERMS, len(points) - 1)):
            if not len(left):
                break
            solved, off = _solve(at[:, terms], examples[left])
            exact = off <= EXACT * np.maximum(1.0, np.abs(examples[left]).max(axis=1))
            coefficients[np.ix_(left[exact], np.array(terms))] = solved[exact]
            left = left[~exact]
        coefficients[left] = self._closest(at, examples[left])
        exactly = np.ones(len(examples), dtype=bool)
        exactly[left] = False
        return coefficients, exactly

    def _closest(self, at: Floats, rows: Floats) -> Floats:
        """By the largest error over the examples; how far it is off elsewhere shows where it is checked."""
        best, error = np.zeros((len(rows), len(self.terms))), np.full(len(rows), np.inf)
        for terms in self._sums(CLOSEST_TERMS) if len(rows) else ():
            solved, off = _solve(at[:, terms], rows)
            better = off < error * (1 - EXACT)
            best[better] = 0.0
            best[np.ix_(better, np.array(terms))] = solved[better]
            error = np.where(better, off, error)
        return best

    def _sums(self, most: int) -> Iterator[tuple[int, ...]]:
        """Sets of terms, small ones first."""
        for count in range(1, most + 1):
            yield from itertools.combinations(range(len(self.terms)), count)


def _product(whole: Floats, axes: str) -> Floats:
    return np.asarray(np.prod([whole[:, AXES.index(axis)] for axis in axes], axis=0, initial=1.0), dtype=np.float64)


def _whole(points: Floats) -> Floats:
    """Every axis."""
    row = points[:, 1] + points[:, 2]
    return np.column_stack([points, row, np.ceil(row / TILE) * TILE])


def _solve(at: Floats, rows: Floats) -> tuple[Floats, Floats]:
    """Coefficients for each row, and how far each is off at most; infinitely where the examples cannot tell the terms apart."""
    scale = np.abs(at).max(axis=0)  # a length squared times a batch is a million times a batch
    solved, _, rank, _ = np.linalg.lstsq(at / scale, rows.T, rcond=1e-10)
    if rank < at.shape[1]:
        return solved.T, np.full(len(rows), np.inf)
    return solved.T / scale, np.abs(at / scale @ solved - rows.T).max(axis=0)
