"""What sizes were found to be in one family, so that another family of the same model needs fewer examples.

The same tensors come again whether layers are recomputed or not and whichever engine generates: a size that has, at every
example, the value of a sum that is known already is that sum. Whether it was so at the far corner is checked by a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.predict.pieces.monomials import Basis, Flags, Floats

ENOUGH = 4
"""From so many examples on the closest short sum says more than the closest known one."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """Rows of examples, said in sums of terms."""

    coefficients: Floats
    exactly: Flags
    vocabulary: Vocabulary
    """With these rows in it."""


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Known sums."""

    basis: Basis
    known: Floats
    """Coefficients of the basis' terms, a row for each sum."""

    @classmethod
    def empty(cls) -> Vocabulary:
        return cls(basis=Basis(()), known=np.zeros((0, 0)))

    def say(self, points: Floats, rows: Floats) -> Said:
        """Each row (one column per point) as a known sum, or else as the shortest one."""
        places = self._recognised(points, rows)
        left = np.flatnonzero(places < 0)
        own, fitted, exactly = _fitted(points, rows[left])
        basis = replace(self.basis, terms=tuple(dict.fromkeys((*self.basis.terms, *own.terms))))
        known = _widened(self.known, self.basis, basis)
        coefficients = np.zeros((len(rows), len(basis.terms)))
        coefficients[places >= 0] = known[places[places >= 0]]
        coefficients[left] = _widened(fitted, own, basis)
        if len(points) < ENOUGH and len(known):
            vague = left[~exactly]
            coefficients[vague] = known[self._closest(points, rows[vague])]
        exact = np.ones(len(rows), dtype=bool)
        exact[left] = exactly
        return Said(
            coefficients=coefficients,
            exactly=exact,
            vocabulary=Vocabulary(basis=basis, known=np.unique(np.concatenate([known, coefficients[left]]), axis=0)),
        )

    def _recognised(self, points: Floats, rows: Floats) -> NDArray[np.int64]:
        """Which known sum each row is; -1 for none."""
        places: dict[tuple[int, ...], int] = {}
        for place, values in enumerate(_whole(self._values(points))):
            places.setdefault(tuple(values), place)
        return np.array([places.get(tuple(row), -1) for row in _whole(rows)], dtype=np.int64)

    def _closest(self, points: Floats, rows: Floats) -> NDArray[np.int64]:
        at = self._values(points)
        return np.array([np.abs(at - row).max(axis=1).argmin() for row in rows], dtype=np.int64)

    def _values(self, points: Floats) -> Floats:
        return self.known @ self.basis.values(points).T if len(self.known) else np.zeros((0, len(points)))


def _fitted(points: Floats, rows: Floats) -> tuple[Basis, Floats, Flags]:
    basis = Basis.of(points)
    coefficients, exactly = basis.fit(points, rows)
    if not exactly.all():
        basis = basis.with_caps(points, rows[~exactly])
        coefficients, exactly = basis.fit(points, rows)
    return basis, coefficients, exactly


def _widened(coefficients: Floats, basis: Basis, wider: Basis) -> Floats:
    """The same sums in a basis that has all of these terms."""
    found = np.zeros((len(coefficients), len(wider.terms)))
    if len(basis.terms):
        found[:, [wider.terms.index(term) for term in basis.terms]] = coefficients
    return found


def _whole(values: Floats) -> list[list[int]]:
    found: list[list[int]] = np.rint(values).astype(np.int64).tolist()
    return found
