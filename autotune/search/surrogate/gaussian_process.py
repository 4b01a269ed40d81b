"""Gaussian process over the fixed table of candidates.

The regressed figure is the residual: measured value minus prior mean (a prediction, or a guess), in
logarithms.

    n, m   candidates in the table, observations at its rows o
    r, v   residual and own variance of each observation, shape (m,)
    a      prior standard deviation of each candidate, shape (n,)
    S_p    part p of the candidates' similarity, shape (n, n) (similarity.py)
    K      prior covariance scale² · (a aᵀ) ∘ Σ_p share_p S_p, shape (n, n)
    σ      standard deviation of the noise of one measurement
    C      K[o, o] + diag(v + σ²) = L Lᵀ (Cholesky), shape (m, m)
    W      L⁻¹ K[o, :], shape (m, n)
    mean   K[:, o] C⁻¹ r;    covariance   K - Wᵀ W

A model is one choice of shares, scale and σ. All are evaluated and weighted by their marginal
likelihood: ten measurements are too few to select one.

For one candidate with a = 0.2, one observation of it with r = 0.1, and σ = 0.02:

    K = 0.04,  C = 0.0404,  mean = 0.04 · 0.1 / 0.0404 = 0.099
    variance = 0.04 - 0.04² / 0.0404 = 0.0004, a standard deviation of 0.02

A candidate with similarity 0.5 to it has K[i, o] = 0.02: its mean is 0.0495.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autotune.core.prediction import Estimate
from autotune.search.surrogate.candidate_table import FloatArray, IndexArray
from autotune.search.surrogate.similarity import Kernels, Shares, SimilarityParts

# Shares of the prior variance: bias of all candidates, single knobs and loads, joint knobs, each
# candidate's own
KERNEL_STRUCTURES: tuple[Shares, ...] = (
    (0.5, 0.35, 0.1, 0.05),
    (0.2, 0.55, 0.15, 0.1),
    (0.15, 0.3, 0.4, 0.15),
)
# Factors on the prior's standard deviation, which may be too narrow
SCALES = (1.0, 1.8)
# Lower bound of the standard deviation of a difference between two candidates
MIN_LEAD_DEVIATION = 1e-3
MIN_RELATIVE_WEIGHT = 0.02  # Models with a smaller likelihood relative to the best one are dropped
MIN_VARIANCE = 1e-9
MIN_DEVIATION = 1e-3  # Lower bound of the standard deviation of a candidate's estimated figure
# Standard deviations between a value and either bound of its interval: 10 % are outside
INTERVAL_DEVIATIONS = 1.64

# Largest ratio of an estimate's value to its lower bound that counts
MAX_VALUE_PER_LOW = 20

_erf = np.vectorize(math.erf, otypes=[float])


def normal_cdf(deviations: FloatArray) -> FloatArray:
    """Φ(x) of the standard normal distribution."""
    scaled = deviations / math.sqrt(2)
    return np.asarray(0.5 * (1 + _erf(scaled)))


def normal_density(deviations: FloatArray) -> FloatArray:
    """φ(x) of the standard normal distribution."""
    normalisation = math.sqrt(2 * math.pi)
    return np.exp(-0.5 * deviations**2) / normalisation


def expected_improvement(
    mean: FloatArray,
    deviation: FloatArray,
    best: float,
) -> FloatArray:
    """E[max(0, value - best)] = (μ - best) Φ(z) + s φ(z), with z = (μ - best) / s."""
    z = (mean - best) / deviation
    gain = (mean - best) * normal_cdf(z)
    return gain + deviation * normal_density(z)


def interval_width(estimate: Estimate) -> float:
    """Return the standard deviation of an estimate's logarithm."""
    low = max(estimate.low, estimate.value / MAX_VALUE_PER_LOW)
    log_ratio = math.log(estimate.high / low)
    return log_ratio / (2 * INTERVAL_DEVIATIONS)


@dataclass(frozen=True)
class Observations:
    rows: IndexArray
    residual: FloatArray
    variance: FloatArray  # Own variance, in addition to the common noise; 0 for a plain measurement

    def equals(self, observations: Observations) -> bool:
        return (
            np.array_equal(self.rows, observations.rows)
            and np.array_equal(self.residual, observations.residual)
            and np.array_equal(self.variance, observations.variance)
        )


@dataclass(frozen=True)
class Posterior:
    """Distribution of one figure for every candidate of the table."""

    mean: FloatArray
    deviation: FloatArray  # Standard deviation of a candidate's value, without measurement noise
    noise: float  # Standard deviation of one measurement
    covariance_with: Callable[[int], FloatArray] = lambda row: np.zeros(1)
    """Return the posterior covariance of every candidate with this one."""

    def lead_over(self, row: int) -> tuple[FloatArray, FloatArray]:
        """Return mean and standard deviation of (each candidate - this one): Var[i - j] = s_i² +
        s_j² - 2 cov(i, j), since similar candidates may both be uncertain and still differ by
        nothing.
        """
        covariance = self.covariance_with(row)
        variance_sum = self.deviation**2 + self.deviation[row] ** 2
        variance = variance_sum - 2 * covariance
        lead = self.mean - self.mean[row]
        variance = np.maximum(variance, MIN_LEAD_DEVIATION**2)
        return lead, np.sqrt(variance)


@dataclass(frozen=True, kw_only=True)
class CovarianceModel:
    shares: Shares
    scale: float
    noise: float
    weight: float = 1.0  # Posterior probability of the model


@dataclass(frozen=True)
class ModelPosterior:
    """Posterior under one model."""

    model: CovarianceModel
    mean: FloatArray
    whitened: FloatArray  # W: its squared column sums are the variance that observations remove

    @property
    def removed_variance(self) -> FloatArray:
        """Diagonal of Wᵀ W."""
        squares = self.whitened**2
        return np.asarray(squares.sum(axis=0))


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
        structures: tuple[Shares, ...] = KERNEL_STRUCTURES,
    ) -> None:
        self.kernels = kernels
        self.amplitude = amplitude
        self.observed = observed
        # S_p[o, :] and S_p[o, o]
        self._similarity = kernels.rows(observed.rows)
        parts = [part[:, observed.rows] for part in self._similarity]
        self._similarity_observed = SimilarityParts(*parts)
        # K[o, :] and K[o, o] at scale 1, by shares
        self._cross: dict[Shares, FloatArray] = {}
        self._covariance: dict[Shares, FloatArray] = {}

        self.models: list[CovarianceModel] = []
        if len(observed.rows):
            self.models = self._weighted(structures, noises)
        self.posterior = self._mixture(noises[0])

    def cross(self, shares: Shares) -> FloatArray:
        """Return K[o, :] at scale 1, shape (m, n)."""
        if shares not in self._cross:
            similarity = self._similarity.mixed(shares)
            self._cross[shares] = self._prior_covariance(similarity, self.amplitude)
        return self._cross[shares]

    def covariance(self, model: CovarianceModel) -> FloatArray:
        """Return C, shape (m, m). Computed apart from `cross`, which is a hundred times wider and
        used by fewer models.
        """
        shares = model.shares
        if shares not in self._covariance:
            similarity = self._similarity_observed.mixed(shares)
            amplitude = self.amplitude[self.observed.rows]
            self._covariance[shares] = self._prior_covariance(similarity, amplitude)
        own_variance = self.observed.variance + model.noise**2
        scaled = self._covariance[shares] * model.scale**2
        return scaled + np.diag(own_variance)

    def _prior_covariance(self, similarity: FloatArray, amplitude: FloatArray) -> FloatArray:
        """Return (a[o] aᵀ) ∘ similarity, for the columns with this amplitude."""
        observed_amplitude = self.amplitude[self.observed.rows]
        by_row = observed_amplitude[:, None]
        return similarity * by_row * amplitude[None, :]

    def _weighted(
        self, structures: Sequence[Shares], noises: Sequence[float]
    ) -> list[CovarianceModel]:
        """Return the models with their weights: likelihood over the sum of likelihoods."""
        models = []
        evidence = []
        for shares, scale, noise in itertools.product(structures, SCALES, noises):
            model = CovarianceModel(
                shares=shares,
                scale=scale,
                noise=noise,
            )
            models.append(model)
            evidence.append(self._log_likelihood(model))
        relative = np.array(evidence) - max(evidence)
        weights = np.exp(relative)
        weights[weights < MIN_RELATIVE_WEIGHT] = 0.0
        weights /= weights.sum()
        weighted = []
        for model, weight in zip(models, weights, strict=True):
            if weight:
                weighted_model = replace(model, weight=float(weight))
                weighted.append(weighted_model)
        return weighted

    def _log_likelihood(self, model: CovarianceModel) -> float:
        """Return -½ rᵀ C⁻¹ r - ½ log |C| (+ constant).

        The last row of the Cholesky factor of [[C, r], [rᵀ, h]] is L⁻¹ r, so no inverse is needed;
        h keeps the matrix positive definite.
        """
        residual = self.observed.residual
        size = len(residual)
        bordered = np.empty((size + 1, size + 1))
        bordered[:size, :size] = self.covariance(model)
        bordered[size, :size] = residual
        bordered[:size, size] = residual
        square = float(residual @ residual)
        bordered[size, size] = square / model.noise**2 + 1.0  # h
        root = np.linalg.cholesky(bordered)
        whitened_residual = root[size, :size]
        log_diagonal = np.log(np.diag(root)[:size])
        log_root_determinant = float(log_diagonal.sum())
        exponent = -0.5 * float(whitened_residual @ whitened_residual)
        return exponent - log_root_determinant

    def _mixture(self, default_noise: float) -> Posterior:
        """Return the moments of the mixture; without observations: the prior.

        With weight w, mean μ_k and variance s_k² of each model: μ = Σ w μ_k;  s² = Σ w (s_k² +
        μ_k²) - μ².
        """
        size = self.kernels.size
        if not self.models:
            return Posterior(
                mean=np.zeros(size),
                deviation=self.amplitude.copy(),
                noise=default_noise,
            )
        posteriors = []
        mean = np.zeros(size)
        square = np.zeros(size)
        variance = np.zeros(size)
        noise = 0.0
        for model in self.models:
            posterior = self._condition(model)
            posteriors.append(posterior)
            model_variance = self.prior_variance(model) - posterior.removed_variance
            mean += model.weight * posterior.mean
            square += model.weight * posterior.mean**2
            variance += model.weight * np.maximum(model_variance, 0.0)
            noise += model.weight * model.noise
        mixed_variance = variance + square - mean**2
        return Posterior(
            mean=mean,
            deviation=np.sqrt(np.maximum(mixed_variance, 0.0)),
            noise=noise,
            covariance_with=partial(self._covariance_with, posteriors, mean),
        )

    def _condition(self, model: CovarianceModel) -> ModelPosterior:
        cross = self.cross(model.shares) * model.scale**2
        root = np.linalg.cholesky(self.covariance(model))
        inverse_root = np.linalg.inv(root)
        whitened_residual = inverse_root @ self.observed.residual
        weights = inverse_root.T @ whitened_residual  # C⁻¹ r
        return ModelPosterior(model, weights @ cross, inverse_root @ cross)

    def prior_variance(self, model: CovarianceModel) -> FloatArray:
        """Return the diagonal of K."""
        similarity = self.kernels.diagonal.mixed(model.shares)
        amplitude = self.amplitude * model.scale
        return similarity * amplitude**2

    def _covariance_with(
        self,
        posteriors: Sequence[ModelPosterior],
        mean: FloatArray,
        row: int,
    ) -> FloatArray:
        """Return column `row` of Σ w (K_k - W_kᵀ W_k + μ_k μ_kᵀ) - μ μᵀ."""
        amplitude = self.amplitude
        similarity = self.kernels.rows(np.array([row]))
        second_moment = np.zeros(self.kernels.size)
        for posterior in posteriors:
            model = posterior.model
            whitened = posterior.whitened
            mixed = similarity.mixed(model.shares)[0]
            prior = mixed * amplitude * amplitude[row] * model.scale**2
            removed = whitened[:, row] @ whitened
            square = posterior.mean * posterior.mean[row]
            second_moment += model.weight * (prior - removed + square)
        return np.asarray(second_moment - mean * mean[row])


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
        structures: tuple[Shares, ...] = KERNEL_STRUCTURES,
    ) -> None:
        self._kernels = kernels
        self._amplitude = amplitude
        self._noises = noises
        self._structures = structures
        self._last: tuple[tuple[float, ...], Fit] | None = None
        self._pending: _PendingVariance | None = None

    def posterior(
        self,
        observed: Observations,
        pending: IndexArray,
        noises: tuple[float, ...] | None = None,
    ) -> Posterior:
        """Return the posterior; its means depend on the observations alone. `noises`: those
        still possible, if fewer.
        """
        current_fit = self._fit(observed, noises or self._noises)
        if not len(pending):
            return current_fit.posterior
        if self._pending is None or self._pending.exceeds(pending):
            self._pending = _PendingVariance(current_fit, self._default_model)
        factor = self._pending.deviation_factor(pending)
        covariance_with = partial(_scaled_covariance, current_fit.posterior, factor)
        deviation = current_fit.posterior.deviation * factor
        return replace(
            current_fit.posterior,
            deviation=deviation,
            covariance_with=covariance_with,
        )

    @property
    def _default_model(self) -> CovarianceModel:
        """Model to use before anything was observed."""
        return CovarianceModel(
            shares=self._structures[0],
            scale=1.0,
            noise=self._noises[0],
        )

    def _fit(self, observed: Observations, noises: tuple[float, ...]) -> Fit:
        if self._last is not None:
            last_noises, last_fit = self._last
            if last_noises == noises and last_fit.observed.equals(observed):
                return last_fit
        current_fit = Fit(
            kernels=self._kernels,
            amplitude=self._amplitude,
            observed=observed,
            noises=noises,
            structures=self._structures,
        )
        self._last = noises, current_fit
        self._pending = None
        return current_fit


def _scaled_covariance(
    posterior: Posterior,
    factor: FloatArray,
    row: int,
) -> FloatArray:
    covariance = posterior.covariance_with(row)
    return np.asarray(covariance * factor * factor[row])


class _PendingVariance:
    """Variance that remains per candidate after pending measurements, under the most likely
    model alone: they do not discriminate between models, and updating all would multiply the
    time.
    """

    def __init__(self, observed_fit: Fit, default: CovarianceModel) -> None:
        self._fit = observed_fit
        self._model = default
        if observed_fit.models:
            self._model = max(observed_fit.models, key=lambda model: model.weight)
        root = np.linalg.cholesky(observed_fit.covariance(self._model))
        cross = observed_fit.cross(self._model.shares)
        whitened_cross = np.linalg.inv(root) @ cross
        self._whitened = whitened_cross * self._model.scale**2
        removed = (self._whitened**2).sum(axis=0)
        prior_variance = observed_fit.prior_variance(self._model)
        self._before = np.maximum(prior_variance - removed, MIN_VARIANCE)
        self._remaining = self._before.copy()
        self.included: set[int] = set()
        """Rows of the pending candidates so far."""

    def deviation_factor(self, pending: IndexArray) -> FloatArray:
        """Return the factor on each standard deviation. `pending` must contain all earlier ones."""
        new = [row for row in pending.tolist() if row not in self.included]
        if new:
            new_rows = np.array(new, dtype=np.int64)
            self._include(new_rows)
        share = self._remaining / self._before
        return np.asarray(np.sqrt(share))

    def exceeds(self, pending: IndexArray) -> bool:
        """Return True if it includes candidates that are not pending."""
        return not self.included <= set(pending.tolist())

    def _include(self, new: IndexArray) -> None:
        """Append rows to W: L_B⁻¹ B, with B = K[new, :] - W[:, new]ᵀ W and L_B L_Bᵀ = B[:, new] +
        σ² I.
        """
        model = self._model
        amplitude = self._fit.amplitude
        mixed = self._fit.kernels.rows(new).mixed(model.shares)
        similarity = mixed * model.scale**2
        by_row = amplitude[new][:, None]
        prior = similarity * by_row * amplitude[None, :]
        removed = self._whitened[:, new].T @ self._whitened
        covariance = prior - removed  # B
        noise_variance = model.noise**2 * np.eye(len(new))
        root = np.linalg.cholesky(covariance[:, new] + noise_variance)
        rows = np.linalg.inv(root) @ covariance
        self._whitened = np.concatenate([self._whitened, rows])
        newly_removed = (rows**2).sum(axis=0)
        self._remaining = np.maximum(self._remaining - newly_removed, MIN_VARIANCE)
        self.included.update(new.tolist())
