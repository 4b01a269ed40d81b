"""Similarity of candidates, the covariance function of the surrogate's Gaussian processes.

Notation, for candidates i and j:

    x_k       position of a candidate on numeric knob k, from 0 to 1
    w_k       weight of knob k, from 0 to 1 (`knob_effects`)
    near_k    exp(-½ ((x_ik - x_jk) / LENGTH_SCALE)²), for numeric knobs
    line_k    3 (x_ik - ½) (x_jk - ½), for numeric knobs
    same_k    1 if both have the same value, else 0
    source    composition of a candidate's prediction, as a unit vector

Each of the functions of a knob is a mixture: `trust` times its value for the predicted positions,
plus (1 - trust) times its value for the actual ones.

The similarity has four parts S_p, each of shape (n, n):

    bias      source_i · source_j
              an error that all candidates of one source have in common
    single    (Σ_numeric w_k ½ (near_k + line_k) + Σ_categorical w_k same_k + load) / (1 + Σ w_k)
              errors that depend on one knob each, or on the load
    joint     Π_numeric (1 - w_k (1 - near_k)) · Π_categorical (1 - JOINT_DECAY w_k (1 - same_k))
              errors that depend on all knobs together
    identity  Π (1 - w_k (1 - same_k)), or with `own_errors` 1 if i = j, else 0
              errors of one candidate

    load      Π_numeric (1 - w_k (1 - near_k)) · Π_categorical (1 - w_k (1 - same_k)),
              over the knobs that a load decides
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autotune.search.surrogate.candidate_table import CandidateTable, FloatArray, IndexArray
from autotune.search.surrogate.knob_effects import KnobEffect, knob_effects

LENGTH_SCALE = 0.6  # Length scale of numeric knobs, whose range is 0 to 1
JOINT_DECAY = 0.6  # Joint similarity lost per differing category
# Similarity rows in the cache: a search requests those of its measured candidates repeatedly
MAX_CACHED_ROWS = 64

Shares = tuple[float, float, float, float]
"""Shares of the prior variance by part, in the order of `SimilarityParts`."""


class SimilarityParts(NamedTuple):
    """Similarities S_p, or some of their rows or elements."""

    bias: FloatArray
    single: FloatArray
    joint: FloatArray
    identity: FloatArray

    def mixed(self, shares: Shares) -> FloatArray:
        """Return Σ_p share_p S_p."""
        mixed = np.zeros_like(self.bias)
        for share, part in zip(shares, self, strict=True):
            mixed += share * part
        return mixed


class Kernels:
    """Similarity of the candidates of a table, for one figure."""

    def __init__(
        self,
        table: CandidateTable,
        sources: FloatArray | None = None,
        figures: FloatArray | None = None,
        own_errors: bool = False,
    ) -> None:
        """`sources`: composition of each candidate's prediction as shares; equal compositions share
        their error. None: all equal. `figures`: logarithms of the predictions, which show the
        effect of each knob; None: all have full effect. `own_errors`: candidates that are predicted
        equal have errors of their own all the same.
        """
        self.size = len(table)
        self._own_errors = own_errors
        self._numeric, self._categorical = knob_effects(table, figures)
        composition = sources
        if composition is None:
            composition = np.ones((self.size, 1))
        norms = np.linalg.norm(composition, axis=1, keepdims=True)
        self._sources = composition / norms
        effects = (*self._numeric, *self._categorical)
        weights = [effect.weight for effect in effects]
        self._total_weight = 1 + sum(weights)
        self._cached_rows: dict[int, FloatArray] = {}  # Of the four parts, shape (4, n)

    def rows(self, rows: IndexArray) -> SimilarityParts:
        """Return S_p[rows, :] for each part."""
        requested = rows.tolist()
        missing = [row for row in dict.fromkeys(requested) if row not in self._cached_rows]
        if missing:
            parts_of_missing = self._compute(np.array(missing))
            computed = np.array(parts_of_missing)
            for place, row in enumerate(missing):
                self._cached_rows[row] = computed[:, place]

        parts = np.empty((4, len(requested), self.size))
        for place, row in enumerate(requested):
            parts[:, place] = self._cached_rows[row]
        for row in list(self._cached_rows)[:-MAX_CACHED_ROWS]:
            del self._cached_rows[row]
        return SimilarityParts(*parts)

    def _compute(self, rows: IndexArray) -> SimilarityParts:
        shape = (len(rows), self.size)
        single = np.zeros(shape)
        load = np.ones(shape)
        joint = np.ones(shape)
        identity = np.ones(shape)
        # 1. Knobs that are numbers, then those that are names.
        for effect in self._numeric:
            near = _mixed(_squared_exponential, effect, rows)
            line = _mixed(_linear, effect, rows)
            distance = effect.weight * (1 - near)
            equal = _mixed(_equal, effect, rows)
            difference = effect.weight * (1 - equal)
            single += effect.weight * 0.5 * (near + line)
            joint *= 1 - distance
            identity *= 1 - difference
            if effect.of_load:
                load *= 1 - distance
        for effect in self._categorical:
            equal = _mixed(_equal, effect, rows)
            difference = effect.weight * (1 - equal)
            single += effect.weight - difference
            joint *= 1 - JOINT_DECAY * difference
            identity *= 1 - difference
            if effect.of_load:
                load *= 1 - difference

        # 2. Candidates themselves, and the sources of their figures.
        if self._own_errors:
            identity = np.equal.outer(rows, np.arange(self.size)).astype(float)
        return SimilarityParts(
            bias=self._sources[rows] @ self._sources.T,
            single=(single + load) / self._total_weight,
            joint=joint,
            identity=identity,
        )

    @cached_property
    def diagonal(self) -> SimilarityParts:
        """Return S_p[i, i] for each part. The linear kernel of `single` is not 1 there."""
        unit = np.ones(self.size)
        single = unit + sum(effect.weight for effect in self._categorical)
        for effect in self._numeric:
            actual = 3.0 * (effect.actual - 0.5) ** 2
            predicted = 3.0 * (effect.predicted - 0.5) ** 2
            line_of_actual = 1 + (1 - effect.trust) * actual
            line = line_of_actual + effect.trust * predicted
            single += effect.weight * 0.5 * line
        return SimilarityParts(
            bias=unit,
            single=single / self._total_weight,
            joint=unit,
            identity=unit,
        )


SimilarityFunction = Callable[[FloatArray, FloatArray], FloatArray]


def _mixed(
    similarity: SimilarityFunction,
    effect: KnobEffect,
    rows: IndexArray,
) -> FloatArray:
    """Return trust · similarity(predicted positions) + (1 - trust) · similarity(actual ones)."""
    column = effect.predicted[rows][:, None]
    predicted = similarity(column, effect.predicted[None, :])
    if effect.trust == 1.0:
        return predicted
    column = effect.actual[rows][:, None]
    actual = similarity(column, effect.actual[None, :])
    return effect.trust * predicted + (1 - effect.trust) * actual


def _squared_exponential(x_i: FloatArray, x_j: FloatArray) -> FloatArray:
    distance = (x_i - x_j) / LENGTH_SCALE
    return np.exp(-0.5 * distance**2)


def _linear(x_i: FloatArray, x_j: FloatArray) -> FloatArray:
    return 3.0 * (x_i - 0.5) * (x_j - 0.5)


def _equal(x_i: FloatArray, x_j: FloatArray) -> FloatArray:
    return np.asarray(x_i == x_j, dtype=float)
