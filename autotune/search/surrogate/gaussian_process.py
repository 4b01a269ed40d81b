"""Gaussian process over the fixed table of candidates.

The regressed figure is the residual: measured value minus prior mean (a prediction, or a guess), in
logarithms.

    n, m   candidates in the table, observations at its rows o
    r, v   residual and own variance of each observation, shape (m,)
    a      prior standard deviation of each candidate, shape (n,)
    S_p    similarity of candidates in part p: bias, single knobs, joint knobs, identity; each of shape (n, n)
    K      prior covariance scale² · (a aᵀ) ∘ Σ_p share_p S_p, shape (n, n)
    C      K[o, o] + diag(v + σ²) = L Lᵀ (Cholesky), shape (m, m), with the noise σ of one measurement
    W      L⁻¹ K[o, :], shape (m, n)
    mean   K[:, o] C⁻¹ r;    covariance   K - Wᵀ W

A model is one choice of shares, scale and σ. All are evaluated and weighted by their marginal
likelihood: ten measurements are too few to select one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autotune.search.surrogate.candidate_table import (
    CandidateTable,
    FloatArray,
    IndexArray,
    KnobEffect,
    knob_effects,
)

Shares = tuple[float, float, float, float]
"""Shares of the prior variance: bias of all candidates, single knobs and loads, joint knobs,
each candidate's own.
"""

Parts = tuple[FloatArray, ...]  # S_p restricted to some rows, in the order of `Shares`
STRUCTURES: tuple[Shares, ...] = (
    (0.5, 0.35, 0.1, 0.05),
    (0.2, 0.55, 0.15, 0.1),
    (0.15, 0.3, 0.4, 0.15),
)

SCALES = (
    0.6,
    1.0,
    1.8,
)  # Factors on the prior's standard deviation, which may be too wide or too narrow
LENGTH_SCALE = 0.6  # Length scale of numeric knobs, whose range is 0 to 1
SOURCE_SHARE = 0.7  # Share of the common bias that depends on the composition of the predictions
JOINT_DECAY = 0.6  # Joint similarity lost per differing category
# Similarity rows in the cache: a search requests those of its measured candidates repeatedly
MAX_CACHED_ROWS = 64
MIN_LEAD_DEVIATION = (
    1e-3  # Lower bound of the standard deviation of a difference between two candidates
)
MIN_RELATIVE_WEIGHT = 0.02  # Models with a smaller likelihood relative to the best one are dropped
MIN_VARIANCE = 1e-9
INTERVAL_DEVIATIONS = (
    1.64  # Standard deviations between a value and either bound of its interval: 10 % are outside
)

_erf = np.vectorize(math.erf, otypes=[float])


def normal_cdf(deviations: FloatArray) -> FloatArray:
    """Φ(x) of the standard normal distribution."""
    return np.asarray(0.5 * (1 + _erf(deviations / math.sqrt(2))))


def expected_improvement(mean: FloatArray, deviation: FloatArray, best: float) -> FloatArray:
    """E[max(0, value - best)] = (μ - best) Φ(z) + s φ(z), with z = (μ - best) / s."""
    z = (mean - best) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    return np.asarray((mean - best) * normal_cdf(z) + deviation * density)


@dataclass(frozen=True)
class Observations:
    indices: IndexArray
    residual: FloatArray
    variance: FloatArray  # Own variance, in addition to the common noise; 0 for a plain measurement


@dataclass(frozen=True)
class Posterior:
    """Distribution of one figure for every candidate of the table."""

    mean: FloatArray
    deviation: (
        FloatArray  # Standard deviation of the candidate's own value, without measurement noise
    )
    noise: float  # Standard deviation of one measurement
    covariance_with: Callable[[int], FloatArray] = lambda index: np.zeros(1)
    """Return the posterior covariance of every candidate with this one."""

    def lead_over(self, index: int) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of (each candidate - this one): Var[i - j] = s_i² +
        s_j² - 2 cov(i, j), since similar candidates may both be uncertain and still differ by
        nothing.
        """
        variance = self.deviation**2 + self.deviation[index] ** 2 - 2 * self.covariance_with(index)
        return self.mean - self.mean[index], np.sqrt(np.maximum(variance, MIN_LEAD_DEVIATION**2))


class Kernels:
    """Similarity of candidates in the four parts S_p."""

    def __init__(
        self,
        table: CandidateTable,
        sources: FloatArray | None = None,
        figures: FloatArray | None = None,
    ) -> None:
        """`sources`: composition of each candidate's prediction as shares; equal compositions share
        their error. None: all equal. `figures`: logarithms of the predictions, which show the
        effect of each knob; None: all have full effect.
        """
        self._numbers, self._categories = knob_effects(table, figures)
        self.size = len(table)
        composition = np.ones((len(table), 1)) if sources is None else sources
        self._sources = composition / np.linalg.norm(composition, axis=1, keepdims=True)
        self._cache: dict[int, tuple[FloatArray, ...]] = {}
        self._parts = 1 + sum(one.weight for one in (*self._numbers, *self._categories))

    def rows(self, indices: IndexArray) -> Parts:
        """Return S_p[indices, :] for each part."""
        requested = indices.tolist()
        new = [index for index in dict.fromkeys(requested) if index not in self._cache]
        if new:
            self._cache.update(
                zip(new, zip(*self._compute(np.array(new)), strict=True), strict=True)
            )
        parts = (
            zip(*(self._cache[index] for index in requested), strict=True)
            if requested
            else [()] * 4
        )
        found = tuple(np.array(part).reshape(len(requested), self.size) for part in parts)
        for index in list(self._cache)[:-MAX_CACHED_ROWS]:
            del self._cache[index]
        return found

    def _compute(self, rows: IndexArray) -> Parts:
        joint, single = np.ones((len(rows), self.size)), np.zeros((len(rows), self.size))
        identity, load = np.ones((len(rows), self.size)), np.ones((len(rows), self.size))
        for one in self._numbers:
            near = _mixed(_squared_exponential, one, rows)
            single += one.weight * 0.5 * (near + _mixed(_linear, one, rows))
            joint *= 1 - one.weight * (1 - near)
            differs = one.weight * (1 - _mixed(_equal, one, rows))
            identity *= 1 - differs
            load *= (
                1 - one.weight * (1 - near) if one.of_load else 1.0
            )  # loads are as similar as their numbers
        for one in self._categories:
            differs = one.weight * (1 - _mixed(_equal, one, rows))
            single += one.weight - differs
            joint *= 1 - JOINT_DECAY * differs
            identity *= 1 - differs
            load *= 1 - differs if one.of_load else 1.0
        bias = 1 - SOURCE_SHARE + SOURCE_SHARE * self._sources[rows] @ self._sources.T
        return bias, (single + load) / self._parts, joint, identity

    def diagonal(self) -> Parts:
        single = np.ones(self.size) + sum(one.weight for one in self._categories)
        for one in self._numbers:
            lines = [3.0 * (column - 0.5) ** 2 for column in (one.actual, one.predicted)]
            single += one.weight * 0.5 * (1 + (1 - one.trust) * lines[0] + one.trust * lines[1])
        ones = np.ones(self.size)
        return ones, single / self._parts, ones, ones


def _mixed(
    similarity: Callable[[FloatArray, FloatArray], FloatArray], one: KnobEffect, rows: IndexArray
) -> FloatArray:
    """trust · similarity(predicted positions) + (1 - trust) · similarity(actual positions)."""
    predicted = similarity(one.predicted[rows][:, None], one.predicted[None, :])
    if one.predicted is one.actual:
        return predicted
    return one.trust * predicted + (1 - one.trust) * similarity(
        one.actual[rows][:, None], one.actual[None, :]
    )


def _squared_exponential(left: FloatArray, right: FloatArray) -> FloatArray:
    return np.asarray(np.exp(-0.5 * ((left - right) / LENGTH_SCALE) ** 2))


def _linear(left: FloatArray, right: FloatArray) -> FloatArray:
    return 3.0 * (left - 0.5) * (right - 0.5)


def _equal(left: FloatArray, right: FloatArray) -> FloatArray:
    return np.asarray(left == right, dtype=float)


def _mix(shares: Shares, parts: Parts) -> FloatArray:
    """Σ_p share_p S_p."""
    return np.asarray(sum(share * part for share, part in zip(shares, parts, strict=True)))


@dataclass(frozen=True, kw_only=True)
class _Model:
    shares: Shares
    scale: float
    noise: float
    weight: float = 1.0  # Posterior probability of the model


@dataclass(frozen=True)
class _ModelPosterior:
    model: _Model
    mean: FloatArray
    # W, shape (m, n): its squared column sums are the variance that the observations remove
    whitened: FloatArray


class Fit:
    """Observations, the models that explain them, and the posterior of their mixture, from a
    prior with mean 0 and standard deviation `amplitude`.
    """

    def __init__(
        self,
        kernels: Kernels,
        amplitude: FloatArray,
        observed: Observations,
        noises: tuple[float, ...],
        structures: tuple[Shares, ...] = STRUCTURES,
    ) -> None:
        self.kernels, self.amplitude, self.observed = kernels, amplitude, observed
        self._rows: Parts = kernels.rows(observed.indices)
        self._among = tuple(part[:, observed.indices] for part in self._rows)
        self._cross: dict[Shares, FloatArray] = {}
        self._covariance: dict[Shares, FloatArray] = {}
        self.models = self._weigh(
            [
                (shares, scale, noise)
                for shares in structures
                for scale in SCALES
                for noise in noises
            ]
        )
        self.posterior = self._mixture(noises[0])

    def cross(self, shares: Shares) -> FloatArray:
        """K[o, :] at scale 1, shape (m, n)."""
        if shares not in self._cross:
            self._cross[shares] = self._with_amplitude(_mix(shares, self._rows), self.amplitude)
        return self._cross[shares]

    def covariance(self, shares: Shares, scale: float, noise: float) -> FloatArray:
        """C, shape (m, m). Computed apart from `cross`, which is a hundred times wider and used
        by fewer models.
        """
        if shares not in self._covariance:
            self._covariance[shares] = self._with_amplitude(
                _mix(shares, self._among), self.amplitude[self.observed.indices]
            )
        return np.asarray(
            self._covariance[shares] * scale**2 + np.diag(self.observed.variance + noise**2)
        )

    def _with_amplitude(self, similarity: FloatArray, amplitude: FloatArray) -> FloatArray:
        return np.asarray(
            similarity * self.amplitude[self.observed.indices][:, None] * amplitude[None, :]
        )

    def _weigh(self, models: list[tuple[Shares, float, float]]) -> list[_Model]:
        """Return the models with their weights: likelihood over the sum of likelihoods."""
        if not len(self.observed.indices):
            return []
        evidence = np.array(
            [
                _log_likelihood(self.covariance(*one), self.observed.residual, one[2])
                for one in models
            ]
        )
        weights = np.exp(evidence - evidence.max())
        weights[weights < MIN_RELATIVE_WEIGHT] = 0.0
        weights /= weights.sum()
        return [
            _Model(shares=shares, scale=scale, noise=noise, weight=float(weight))
            for (shares, scale, noise), weight in zip(models, weights, strict=True)
            if weight
        ]

    def _mixture(self, default_noise: float) -> Posterior:
        """Moments of the mixture: μ = Σ w μ_k;  s² = Σ w (s_k² + μ_k²) - μ². Without observations: the prior."""
        size, amplitude = self.kernels.size, self.amplitude
        if not self.models:
            return Posterior(np.zeros(size), amplitude.copy(), default_noise)
        diagonal, parts = self.kernels.diagonal(), [self._condition(one) for one in self.models]
        mean, square, spread = np.zeros(size), np.zeros(size), np.zeros(size)
        for one in parts:
            prior = _mix(one.model.shares, diagonal) * (amplitude * one.model.scale) ** 2
            mean += one.model.weight * one.mean
            square += one.model.weight * one.mean**2
            spread += one.model.weight * np.maximum(prior - (one.whitened**2).sum(axis=0), 0.0)
        noise = sum(one.weight * one.noise for one in self.models)
        deviation = np.sqrt(np.maximum(spread + square - mean**2, 0.0))

        def covariance_with(index: int) -> FloatArray:
            """Σ w (K_k - W_kᵀ W_k + μ_k μ_kᵀ) - μ μᵀ, column `index`."""
            row, mean, found = self.kernels.rows(np.array([index])), np.zeros(size), np.zeros(size)
            for one in parts:
                prior = (
                    _mix(one.model.shares, row)[0]
                    * amplitude
                    * amplitude[index]
                    * one.model.scale**2
                )
                mean += one.model.weight * one.mean
                found += one.model.weight * (
                    prior - one.whitened[:, index] @ one.whitened + one.mean * one.mean[index]
                )
            return np.asarray(found - mean * mean[index])

        return Posterior(mean, deviation, noise, covariance_with)

    def _condition(self, model: _Model) -> _ModelPosterior:
        cross = self.cross(model.shares) * model.scale**2
        inverse_root = np.linalg.inv(
            np.linalg.cholesky(self.covariance(model.shares, model.scale, model.noise))
        )
        mean = (inverse_root.T @ (inverse_root @ self.observed.residual)) @ cross
        return _ModelPosterior(model, mean, inverse_root @ cross)


def _log_likelihood(covariance: FloatArray, residual: FloatArray, noise: float) -> float:
    """-½ rᵀ C⁻¹ r - ½ log |C| (+ constant). The last row of the Cholesky factor of [[C, r], [rᵀ, h]] is L⁻¹ r, so no inverse is
    needed; h keeps it positive definite.
    """
    h = float(residual @ residual) / noise**2 + 1.0
    root = np.linalg.cholesky(
        np.block([[covariance, residual[:, None]], [residual[None, :], np.array([[h]])]])
    )
    white = root[-1, :-1]
    return -0.5 * float(white @ white) - float(np.log(np.diag(root)[:-1]).sum())


class Regression:
    """Figure of every candidate, updated while measurements are pending.

    A pending measurement has no value yet, but its effect on the variance is known: the posterior's
    deviations shrink as if it were observed, so that the next choice is not more of the same. The
    full fit is recomputed only for new observations; a pending candidate adds one row to W.
    """

    def __init__(
        self,
        kernels: Kernels,
        amplitude: FloatArray,
        noises: tuple[float, ...],
        structures: tuple[Shares, ...] = STRUCTURES,
    ) -> None:
        self._kernels, self._amplitude, self._noises, self._structures = (
            kernels,
            amplitude,
            noises,
            structures,
        )
        self._last: tuple[tuple[float, ...], Fit] | None = None
        self._pending: _PendingVariance | None = None

    def posterior(
        self, observed: Observations, pending: IndexArray, noises: tuple[float, ...] | None = None
    ) -> Posterior:
        """Return the posterior; its means depend on the observations alone. `noises`: those
        still possible, if fewer.
        """
        fit = self._fit(observed, noises or self._noises)
        if not len(pending):
            return fit.posterior
        if self._pending is None or not self._pending.included <= set(pending.tolist()):
            self._pending = _PendingVariance(
                fit, _Model(shares=self._structures[0], scale=1.0, noise=self._noises[0])
            )
        found, left = fit.posterior, self._pending.deviation_left(pending)
        return replace(
            found,
            deviation=found.deviation * left,
            covariance_with=lambda i: found.covariance_with(i) * left * left[i],
        )

    def _fit(self, observed: Observations, noises: tuple[float, ...]) -> Fit:
        if self._last is not None and self._last[0] == noises:
            last = self._last[1].observed
            pairs = (
                (last.indices, observed.indices),
                (last.residual, observed.residual),
                (last.variance, observed.variance),
            )
            if all(np.array_equal(left, right) for left, right in pairs):
                return self._last[1]
        fit = Fit(self._kernels, self._amplitude, observed, noises, self._structures)
        self._last, self._pending = (noises, fit), None
        return fit


class _PendingVariance:
    """Variance that remains per candidate after pending measurements, under the most likely
    model alone: they do not discriminate between models, and updating all would multiply the
    time.
    """

    def __init__(self, fit: Fit, default: _Model) -> None:
        """`default`: the model to use before anything was observed."""
        self._fit, self._model = fit, max(fit.models, key=lambda one: one.weight, default=default)
        shares, scale = self._model.shares, self._model.scale
        root = np.linalg.cholesky(fit.covariance(shares, scale, self._model.noise))
        self._whitened = np.linalg.inv(root) @ fit.cross(shares) * scale**2
        prior = _mix(shares, fit.kernels.diagonal()) * (fit.amplitude * scale) ** 2
        self._before = np.maximum(prior - (self._whitened**2).sum(axis=0), MIN_VARIANCE)
        self._left = self._before.copy()
        self.included: set[int] = set()
        """Rows of the pending candidates so far."""

    def deviation_left(self, pending: IndexArray) -> FloatArray:
        """Return the factor on each standard deviation. `pending` must contain all earlier ones."""
        new = np.array(
            [index for index in pending.tolist() if index not in self.included], dtype=np.int64
        )
        if len(new):
            # Append rows to W: B = K[new, :] - W[:, new]ᵀ W;  rows = L_B⁻¹ B, L_B L_Bᵀ = B[:, new] + σ² I.
            model, amplitude = self._model, self._fit.amplitude
            similarity = _mix(model.shares, self._fit.kernels.rows(new)) * model.scale**2
            beyond = (
                similarity * amplitude[new][:, None] * amplitude[None, :]
                - self._whitened[:, new].T @ self._whitened
            )
            root = np.linalg.cholesky(beyond[:, new] + model.noise**2 * np.eye(len(new)))
            rows = np.linalg.inv(root) @ beyond
            self._whitened = np.concatenate([self._whitened, rows])
            self._left = np.maximum(self._left - (rows**2).sum(axis=0), MIN_VARIANCE)
            self.included.update(new.tolist())
        return np.asarray(np.sqrt(self._left / self._before))
