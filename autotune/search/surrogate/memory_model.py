"""Memory of every candidate: peak relative to the limit, predicted and corrected by measurements.

Peaks are estimated by the stretches of a cycle. An engine that is awake during the rollout and
activations kept for the backward pass have different prediction errors, so each stretch is
corrected by the peaks measured in it. A candidate fits if every stretch does.

    y_s      log(peak of stretch s / limit)
    prior    mean of y_s: the predicted one, or a guess;  width: its standard deviation, by the half
             of the predicted interval in which the limit may be
    μ_s, s_s posterior mean and standard deviation of y_s, by regression of (measured y_s - prior)
    need     the stretch with the highest μ_s
    fits     Π_s Φ(-μ_s / s_s), the probability that no stretch exceeds the limit
    lower    max_s (μ_s - INTERVAL_DEVIATIONS · s_s): a candidate above 0 is refused

After an out-of-memory error only a lower bound of y_s is known (`_with_bounds`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.answer import Trial
from autotune.core.measurement import Measurement, Phase
from autotune.core.prediction import Estimate, Prediction
from autotune.search.surrogate.candidate_table import CandidateTable, FloatArray, IndexArray
from autotune.search.surrogate.gaussian_process import (
    INTERVAL_DEVIATIONS,
    MAX_VALUE_PER_LOW,
    MIN_DEVIATION,
    Fit,
    Observations,
    Posterior,
    Regression,
    normal_cdf,
    normal_density,
)
from autotune.search.surrogate.implications import blames_engine
from autotune.search.surrogate.similarity import Kernels

STRETCHES: Mapping[str, tuple[Phase, ...]] = {
    "loading": ("load",),
    "rollout": ("rollout", "sync"),
    "training": ("reward", "score", "forward", "backward", "optimizer"),
}
# Single stretch, for candidates that were not predicted by phase
WHOLE_CYCLE: Mapping[str, tuple[Phase, ...]] = {
    "cycle": (*STRETCHES["loading"], *STRETCHES["rollout"], *STRETCHES["training"])
}

MIN_MEMORY_WIDTH = 0.08  # Lower bound of a prediction's standard deviation, as a share
UNPREDICTED_WIDTH = 0.7  # Standard deviation of an unpredicted need, around half of the limit
LOG_HALF = math.log(0.5)
# Without predictions: logarithmic memory added per doubling of a memory consumer
NEED_PER_DOUBLING = 0.1
# Peak of a stretch without predicted phases, as a share of the candidate's peak
UNPREDICTED_STRETCH_SHARE = 0.1
# Possible standard deviations between two measurements of one candidate
MEMORY_NOISE = (0.004, 0.02)
OOM_FACTOR = 1.005  # Lower bound of need / limit after an out-of-memory error
MIN_BOUND_DEVIATION = 0.01  # Lower bound of the standard deviation that a bound leaves
# Deviations from which λ of a truncated distribution equals z, and the least Φ(-z) to divide by
ASYMPTOTIC_DEVIATIONS = 5
MIN_PROBABILITY = 1e-9


class _Residuals:
    """Measured y_s minus its prior, by row."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.values: list[float] = []

    def add(self, row: int, value: float) -> None:
        self.rows.append(row)
        self.values.append(value)

    def observations(self) -> Observations:
        rows = np.array(self.rows, dtype=np.int64)
        values = np.array(self.values)
        return Observations(rows, values, np.zeros(len(rows)))


@dataclass(frozen=True)
class _Stretch:
    phases: tuple[Phase, ...]
    prior: FloatArray
    width: FloatArray
    kernels: Kernels
    regression: Regression


class MemoryModel:
    """Predicted peaks, corrected by measured ones."""

    def __init__(
        self,
        table: CandidateTable,
        predictions: Sequence[Prediction | None],
        limit_bytes: int,
    ) -> None:
        self._table = table
        self._limit_bytes = limit_bytes

        # 1. What was predicted, and whether it tells the phases apart.
        self._training_devices: list[int | None] = [None] * len(predictions)
        predicted = np.zeros(len(predictions), dtype=bool)
        by_phase = True
        for row, prediction in enumerate(predictions):
            if prediction is not None:
                self._training_devices[row] = prediction.training_devices
                predicted[row] = True
                by_phase = by_phase and bool(prediction.phases)
        by_phase = by_phase and bool(predicted.any())

        # 2. A regression for each stretch.
        doublings = NEED_PER_DOUBLING * table.steps
        guess = np.where(predicted, 0.0, doublings)
        phases_by_stretch = STRETCHES if by_phase else WHOLE_CYCLE
        self._stretches: dict[str, _Stretch] = {}
        for name, phases in phases_by_stretch.items():
            prior, width = _priors(predictions, phases, by_phase, limit_bytes)
            prior += guess
            # The predictions show each knob's effect on the stretch; an unpredicted candidate gets
            # their median.
            figures = None
            if by_phase:
                median = np.median(prior[predicted])
                figures = np.where(predicted, prior, median)
            kernels = Kernels(table, figures=figures)
            regression = Regression(kernels, width, MEMORY_NOISE)
            self._stretches[name] = _Stretch(
                phases=phases,
                prior=prior,
                width=width,
                kernels=kernels,
                regression=regression,
            )

    def posterior(
        self, trials: Sequence[Trial], pending: IndexArray
    ) -> tuple[Posterior, FloatArray, FloatArray]:
        """Return need, fits and lower."""
        measurements: list[tuple[int, Measurement]] = []
        for trial in trials:
            row = self._table.row_by_id.get(trial.candidate.id)
            if row is not None and not blames_engine(trial.measurement):
                measurements.append((row, trial.measurement))

        means_by_stretch = []
        deviations_by_stretch = []
        noises = []
        for name in self._stretches:
            posterior = self._corrected(name, measurements, pending)
            means_by_stretch.append(posterior.mean)
            deviations_by_stretch.append(posterior.deviation)
            noises.append(posterior.noise)
        means = np.array(means_by_stretch)
        deviations = np.array(deviations_by_stretch)

        highest = means.argmax(axis=0)
        rows = np.arange(len(self._table))
        need = Posterior(
            mean=means[highest, rows],
            deviation=deviations[highest, rows],
            noise=statistics.fmean(noises),
        )
        chances = normal_cdf(-means / deviations)
        fits = np.prod(chances, axis=0)
        lower_bounds = means - INTERVAL_DEVIATIONS * deviations
        lower = lower_bounds.max(axis=0)
        return need, fits, lower

    def _corrected(
        self,
        name: str,
        measurements: Sequence[tuple[int, Measurement]],
        pending: IndexArray,
    ) -> Posterior:
        """Return the posterior of one stretch."""
        stretch = self._stretches[name]
        peaks = _Residuals()
        bounds = _Residuals()
        for row, measurement in measurements:
            if measurement.outcome.is_out_of_memory:
                if self._ran_out_in(name, row, measurement):
                    need_bytes = minimum_need(measurement)
                    need = math.log(need_bytes / self._limit_bytes)
                    bounds.add(row, need - stretch.prior[row])
            elif measurement.worst is not None:
                peak_bytes = self._peak_in(name, row, measurement)
                if peak_bytes:
                    need = math.log(peak_bytes / self._limit_bytes)
                    peaks.add(row, need - stretch.prior[row])

        observed = peaks.observations()
        if bounds.rows:
            unbounded = Fit(stretch.kernels, stretch.width, observed, MEMORY_NOISE)
            observed = _with_bounds(observed, bounds.observations(), unbounded.posterior)
        residual = stretch.regression.posterior(observed, pending)
        deviation = np.maximum(residual.deviation, MIN_DEVIATION)
        mean = residual.mean + stretch.prior
        return replace(residual, mean=mean, deviation=deviation)

    def _ran_out_in(
        self,
        name: str,
        row: int,
        measurement: Measurement,
    ) -> bool:
        """Return True if memory ran out in the stretch; without a phase, in the most demanding
        one.
        """
        phase = None
        if measurement.failure:
            phase = measurement.failure.phase
        if any(phase in stretch.phases for stretch in self._stretches.values()):
            return phase in self._stretches[name].phases
        return name == self._most_demanding(row)

    def _peak_in(
        self,
        name: str,
        row: int,
        measurement: Measurement,
    ) -> int | None:
        """Return the peak measured in the stretch. A peak without phases belongs to the most
        demanding stretch.
        """
        memory = measurement.memory.on_first(self._training_devices[row])
        if not memory.phase_peak_bytes:
            if name != self._most_demanding(row):
                return None
            return memory.peak_bytes
        peaks = []
        for phase in self._stretches[name].phases:
            if phase in memory.phase_peak_bytes:
                peaks.append(memory.phase_peak_bytes[phase])
        return max(peaks, default=None)

    def _most_demanding(self, row: int) -> str:
        def need(name: str) -> float:
            return float(self._stretches[name].prior[row])

        return max(self._stretches, key=need)


def minimum_need(measurement: Measurement) -> float:
    """Return the least bytes that a candidate needs after it ran out: max(peak + requested,
    limit · OOM_FACTOR).
    """
    memory = measurement.memory
    peak_bytes = memory.peak_bytes or 0
    needed_bytes = peak_bytes + measurement.requested_bytes
    return max(needed_bytes, memory.limit_bytes * OOM_FACTOR)


def _priors(
    predictions: Sequence[Prediction | None],
    phases: tuple[Phase, ...],
    by_phase: bool,
    limit_bytes: int,
) -> tuple[FloatArray, FloatArray]:
    """Return mean and standard deviation of a stretch's y_s by row."""
    means = np.full(len(predictions), LOG_HALF)
    widths = np.full(len(predictions), UNPREDICTED_WIDTH)
    for row, prediction in enumerate(predictions):
        if prediction is None or prediction.peak_memory_bytes.value <= 0:
            continue
        peak = _predicted_peak(prediction, phases, by_phase)
        share = peak.scaled(1 / limit_bytes)
        means[row] = math.log(share.value)
        widths[row] = max(MIN_MEMORY_WIDTH, _width_towards_limit(share))
    return means, widths


def _width_towards_limit(share: Estimate) -> float:
    """Return the standard deviation of log(share) by the half of its interval in which the limit
    may be. The halves differ: under pressure torch needs far less than it reserves.
    """
    half = math.log(share.high / share.value)
    if share.value > 1:
        low = max(share.low, share.value / MAX_VALUE_PER_LOW)
        half = math.log(share.value / low)
    return half / INTERVAL_DEVIATIONS


def _predicted_peak(
    prediction: Prediction,
    phases: tuple[Phase, ...],
    by_phase: bool,
) -> Estimate:
    whole_peak = prediction.peak_memory_bytes
    if not by_phase:
        return whole_peak
    peaks = [phase.peak_bytes for phase in prediction.phases if phase.name in phases]
    unpredicted = whole_peak.scaled(UNPREDICTED_STRETCH_SHARE)
    return max(peaks, key=lambda peak: peak.value, default=unpredicted)


def _with_bounds(
    observed: Observations,
    bounds: Observations,
    posterior: Posterior,
) -> Observations:
    """Add lower bounds b as the moments of the normal distribution truncated to values above b.

    With z = (b - μ)/s and λ = φ(z)/Φ(-z), which tends to z:

        E = μ + s λ,  Var = s² (1 + z λ - λ²)
    """
    rows = bounds.rows
    b = bounds.residual
    mean = posterior.mean[rows]
    deviation = np.maximum(posterior.deviation[rows], MIN_BOUND_DEVIATION)
    z = (b - mean) / deviation
    tail = np.maximum(normal_cdf(-z), MIN_PROBABILITY)
    ratio = normal_density(z) / tail
    ratio = np.where(z > ASYMPTOTIC_DEVIATIONS, z, ratio)  # λ
    expected = np.maximum(mean + deviation * ratio, b)
    variance = deviation**2 * (1 + z * ratio - ratio**2)
    variance = np.maximum(variance, MIN_BOUND_DEVIATION**2)
    return Observations(
        np.concatenate([observed.rows, rows]),
        np.concatenate([observed.residual, expected]),
        np.concatenate([observed.variance, variance]),
    )
