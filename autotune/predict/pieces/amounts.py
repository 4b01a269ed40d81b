"""Counted work as sums of products: more terms than a tensor's size has, but fewer to choose among.

What makes a batch of completions is counted for the whole batch, micro-step after micro-step, so all of it goes with their
number; the passes behind it are counted for the same few micro-steps, however many there are. Work is never negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from autotune.measurement import Phase
from autotune.predict.pieces.monomials import EXACT, Basis, Floats, Term
from autotune.predict.speed import MAKING_A_BATCH

Name: TypeAlias = tuple[Phase, str]
"""A phase, and what is counted in it."""

Key: TypeAlias = tuple[bool, Name]
"""Inside the layers (True) or outside of them."""

A_MICRO_STEP = ("", "BS", "S", "BSS", "BC", "B", "C", "BCC")
"""Weights, hidden states, positions, attention, logits: what one pass may go with."""

CUT = ("N", "BNS", "BNC")
"""The batch of completions is cut into micro-batches by the first of them."""

MOST_TERMS = 5
"""One point more than that is looked at by whoever lends."""


def basis_of(points: Floats, loops: Iterable[Term], known: Basis) -> Basis:
    """The terms that can be told apart here, and those that are known already. The constant is the first."""
    axes = (*A_MICRO_STEP, *CUT, *(axes + "N" for axes in A_MICRO_STEP if axes + "N" not in CUT))
    several = dict.fromkeys("".join(sorted(one, key="BNSC".index)) for one in axes)
    plain = [Term(((one, 1.0),)) for one in several]
    full = [
        replace(loop, rounds=rounds, each=axes) for loop in loops if loop.cap for rounds in (True, False) for axes in ("", "N")
    ]
    at = Basis((*plain, *full)).values(points)
    moving = [term for term, row in zip((*plain, *full), at.T, strict=True) if np.ptp(row) > 0]
    return Basis(tuple(dict.fromkeys((Term((("", 1.0),)), *known.terms, *moving))))


@dataclass(frozen=True, kw_only=True)
class Amounts:
    """What is counted, in coefficients of the basis' terms."""

    basis: Basis
    of: Mapping[Key, Floats]

    @classmethod
    def none(cls) -> Amounts:
        return cls(basis=Basis(()), of={})

    def with_those(self, basis: Basis, points: Floats, rows: Mapping[Key, Floats]) -> Amounts:
        """These too, each from what it is at the points. Where they are too few, as the same is in the family that is known."""
        at, known = basis.values(points), {key: _widened(row, self.basis, basis) for key, row in self.of.items()}
        return Amounts(basis=basis, of={**known, **{key: _said(key, basis, at, row, known) for key, row in rows.items()}})


def _said(key: Key, basis: Basis, at: Floats, row: Floats, known: Mapping[Key, Floats]) -> Floats:
    like = known.get(key)
    for other in (() if like is None else (like,), known.values()):
        for one in other:
            if np.abs(at @ one - row).max() <= EXACT * max(1.0, row.max()):
                return one
    found, off = _shortest(at, row, *_terms(basis, key[1][0]))
    if off <= EXACT or like is None or not (at @ like > 0).all():
        return found
    return _alike(at, row, like)


def _terms(basis: Basis, phase: Phase) -> tuple[list[int], list[int]]:
    """Those that most of what this phase counts goes with, and those that a little of it may go with."""
    of_batch, mostly, little = phase in MAKING_A_BATCH, [0], []
    for place, term in enumerate(basis.terms[1:], 1):
        axes = term.each if term.cap else term.products[0][0]
        if ("N" in axes) == of_batch:
            mostly.append(place)
        elif axes in CUT:
            little.append(place)
    return mostly, little


def _shortest(at: Floats, row: Floats, mostly: list[int], little: list[int]) -> tuple[Floats, float]:
    """The shortest sum that is exact, or else the closest of those that take nothing away and can be most of it; and how far it
    is off, relatively."""
    best, error, rare = np.zeros(at.shape[1]), np.inf, frozenset(little)
    if not row.any():
        return best, 0.0
    weights = 1 / np.maximum(np.abs(row), EXACT * np.abs(row).max())
    weighted, aim = at * weights[:, None], row * weights
    for several in _sums([*mostly, *little], min(MOST_TERMS, len(row) - 1)):
        solved, off = _solved(weighted[:, several], aim)
        exact = off <= EXACT
        closer = off < error * (1 - EXACT) and solved.min() >= 0 and rare.isdisjoint(several)
        if exact or closer:
            best, error = np.zeros(at.shape[1]), off
            best[list(several)] = solved
        if exact:
            break
    return best, float(error)


def _sums(terms: list[int], most: int) -> Iterator[tuple[int, ...]]:
    """Short ones first."""
    for count in range(1, max(1, most) + 1):
        yield from itertools.combinations(terms, count)


def _solved(at: Floats, aim: Floats) -> tuple[Floats, float]:
    scale = np.abs(at).max(axis=0)
    solved, _, rank, _ = np.linalg.lstsq(at / scale, aim, rcond=1e-10)
    if rank < at.shape[1]:
        return solved, np.inf
    return solved / scale, float(np.abs(at / scale @ solved - aim).max())


def _alike(at: Floats, row: Floats, like: Floats) -> Floats:
    """The known sum with each of its terms in another amount, none changed more than it takes."""
    terms = np.flatnonzero(like)
    share = at[:, terms] * like[terms] / (at @ like)[:, None]
    wanted = row / (at @ like)
    whole = float(np.median(wanted))
    more = np.linalg.lstsq(share, wanted - whole, rcond=1e-6)[0]
    found = np.zeros_like(like)
    found[terms] = like[terms] * np.maximum(0.0, whole + more)
    return found


def _widened(row: Floats, basis: Basis, wider: Basis) -> Floats:
    found = np.zeros(len(wider.terms))
    found[[wider.terms.index(term) for term in basis.terms]] = row
    return found
