"""Speed of every candidate: seconds by group of phases, predicted and corrected by measured ones.

A micro-batch does not affect the engine, and an engine's memory share does not affect the backward
pass: the error measured in one candidate's rollout transfers to other rollouts. An error that the
phases have in common is the machine's (a card below its figures), and transfers to all of them.

    g        group of phases: rollout, sync, training, and the rest of a cycle
    p_g      predicted seconds of the group in one cycle
    T        predicted tokens of one cycle
    e_g      log(measured seconds / p_g)
    l        level: the part of e_g that all groups of this machine have in common
    d_g      e_g - l, by regression over the measured candidates
    t_g      p_g exp(l + d_g): corrected seconds;  t = Σ t_g
    speed    log(T / t);  Var = Σ_g (t_g / t)² Var(d_g)

The level is the expected value of l ~ N(0, τ²), where each e_g = l + N(0, s_g²):

    E[l] = Σ_g e_g / s_g² / (1 / τ² + Σ_g 1 / s_g²)

Example: 6 s of rollout and 2 s of training are predicted, 12 s and 2 s measured. With τ = s_g = 0.5
the errors 0.69 and 0 have the level 0.23. The rollout's own error is 0.46, that of training -0.23.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autotune.core.answer import Trial
from autotune.core.measurement import Phase, Speed
from autotune.core.prediction import Estimate, Prediction
from autotune.core.run_statistics import UNKNOWN_DEVIATION
from autotune.search.surrogate.candidate_table import CandidateTable, FloatArray, IndexArray
from autotune.search.surrogate.gaussian_process import (
    MIN_DEVIATION,
    Observations,
    Posterior,
    Regression,
    interval_width,
)
from autotune.search.surrogate.similarity import Kernels, Shares
from autotune.worker.phase_recorder import SINGLE_CYCLE_FACTOR

PHASE_GROUPS: Mapping[str, tuple[Phase, ...]] = {
    "rollout": ("rollout",),
    "sync": ("sync",),
    "training": ("score", "forward", "backward"),
}
"""Phases that are corrected together. The rest of a cycle is one further group."""

REST = "rest"
# Bounds of the standard deviation of a logarithmic error, of a phase's and of a whole cycle's
MIN_PHASE_WIDTH = 0.15
MAX_WIDTH = 1.0
# Standard deviation of the logarithmic error that all phases of a machine have in common
LEVEL_DEVIATION = 0.5
# Shares of the prior variance. Either a phase's error is nearly the same for all candidates, or it
# depends on their settings, or each candidate has one of its own: a study's residuals decide.
SPEED_STRUCTURES: tuple[Shares, ...] = (
    (0.9, 0.08, 0.015, 0.005),
    (0.4, 0.45, 0.12, 0.03),
    (0.3, 0.25, 0.1, 0.35),
)
# Measured / predicted seconds, and standard deviations, beyond which a phase is an outlier of its
# load (a cache that holds one sequence at a time, for example), without evidence about other loads.
CLIFF_FACTOR = 3.0
# Standard deviation of a probe that was stopped after one cycle: maybe a disturbance of the machine
# was all that was slow.
SINGLE_CYCLE_DEVIATION = math.log(SINGLE_CYCLE_FACTOR)
# Standard deviation of an unpredicted speed, around the measured ones
UNPREDICTED_SPEED_WIDTH = 0.6
SPEED_PER_DOUBLING = 0.07  # Without predictions: logarithmic speed gained per doubling of memory
MIN_PHASE_SHARE = 1e-4  # Share of a cycle below which a phase carries no information


Covariance = Callable[[int], FloatArray]
Predictions = Sequence[Prediction | None]
"""Prediction of each candidate by row; None: it cannot be predicted."""


@dataclass(frozen=True)
class _Cycle:
    """Measured seconds of one cycle by group."""

    row: int
    seconds: Mapping[str, float]
    deviation: float  # Standard deviation of the logarithm, in addition to the common noise


class ThroughputModel:
    """Predicted seconds by phase, corrected by measured ones.

    Each candidate is probed once, so its own error and a lucky run look alike. The noise of a run
    is therefore not fitted but given: the spread between runs (`core.run_statistics`).
    """

    def __init__(self, table: CandidateTable, predictions: Predictions) -> None:
        self._table = table
        self._seconds: dict[str, FloatArray] = {}  # p_g
        self._widths: dict[str, FloatArray] = {}  # s_g
        self._regressions: dict[str, Regression] = {}
        for group in (*PHASE_GROUPS, REST):
            seconds, width = _group_priors(predictions, group)
            # Passes of the trainer are the same code whatever generates: only generation's errors
            # differ by its kind.
            sources = None if group == "training" else table.kinds
            logs = _log_figures(seconds)
            kernels = Kernels(table, sources, logs, own_errors=True)
            self._seconds[group] = seconds
            self._widths[group] = width
            self._regressions[group] = Regression(
                kernels=kernels,
                amplitude=width,
                noises=(UNKNOWN_DEVIATION,),
                structures=SPEED_STRUCTURES,
            )

        rates: list[float | None] = []
        for prediction in predictions:
            rate = None if prediction is None else prediction.ranking_rate
            rates.append(None if rate is None else rate.value)
        cycle_seconds = sum(self._seconds.values())
        self._tokens = _filled(rates) * cycle_seconds

    @classmethod
    def has_phase_times(cls, predictions: Predictions) -> bool:
        """Return True if every prediction has seconds by phase."""
        predicted = [prediction for prediction in predictions if prediction is not None]
        if not predicted:
            return False
        return all(_is_timed(prediction) for prediction in predicted)

    def posterior(
        self,
        trials: Sequence[Trial],
        pending: IndexArray,
        noise: float,
    ) -> Posterior:
        """Return the posterior of log(tokens per second)."""
        # 1. The newest cycle of each candidate, and the error that all groups have in common.
        cycles: dict[int, _Cycle] = {}
        for trial in trials:
            cycle = self._cycle(trial)
            if cycle is not None:
                cycles[cycle.row] = cycle
        level = self._level(cycles.values())

        # 2. Each group's own error, and its corrected seconds.
        newest_cycles = tuple(cycles.values())
        errors: dict[str, Posterior] = {}
        corrected: dict[str, FloatArray] = {}
        for group, predicted_seconds in self._seconds.items():
            error = self._error_posterior(
                group=group,
                cycles=newest_cycles,
                level=level,
                noise=noise,
                pending=pending,
            )
            errors[group] = error
            factor = np.exp(level + error.mean)
            corrected[group] = predicted_seconds * factor

        # 3. The cycle: the sum of its groups.
        cycle_seconds = np.zeros(len(self._table))
        for seconds in corrected.values():
            cycle_seconds += seconds
        variance = np.zeros(len(self._table))
        covariances = []
        for group, seconds in corrected.items():
            weight = seconds / cycle_seconds
            weighted_deviation = weight * errors[group].deviation
            variance += weighted_deviation**2
            covariance_with = errors[group].covariance_with
            covariances.append((weight, covariance_with))
        rate = self._tokens / cycle_seconds
        deviation = np.sqrt(variance)
        return Posterior(
            mean=np.log(rate),
            deviation=np.maximum(deviation, MIN_DEVIATION),
            noise=noise,
            covariance_with=partial(_weighted_covariance, covariances),
        )

    def _cycle(self, trial: Trial) -> _Cycle | None:
        """Return the trial's cycle; None if it was not timed by phase."""
        row = self._table.row_by_id.get(trial.candidate.id)
        speed = trial.measurement.ranking_speed
        if row is None or speed is None:
            return None
        if speed.tokens_per_second <= 0:
            return None
        stopped = speed.cut_short and len(speed.rates) == 1
        cycle_seconds = self._tokens[row] / speed.tokens_per_second
        # A user's own objective need not report phases: each is off by as much.
        predicted = {}
        for group, seconds in self._seconds.items():
            predicted[group] = float(seconds[row])
        parts = _split(speed) or predicted
        total = sum(parts.values())
        scaled = {}
        for group, part in parts.items():
            scaled[group] = part / total * cycle_seconds
        return _Cycle(
            row=row,
            seconds=scaled,
            deviation=SINGLE_CYCLE_DEVIATION if stopped else 0.0,
        )

    def _level(self, cycles: Collection[_Cycle]) -> float:
        """Return E[l]; outliers of a load are no evidence for it."""
        pull = 0.0
        precision = 1 / LEVEL_DEVIATION**2
        for group in PHASE_GROUPS:
            errors = []
            widths = []
            for cycle in self._informative(group, cycles):
                is_cliff = self._is_cliff(group, cycle, 0.0)
                if not cycle.deviation and not is_cliff:
                    error = self._error(group, cycle)
                    errors.append(error)
                    width = self._widths[group][cycle.row]
                    widths.append(width)
            if errors:
                weight = 1 / statistics.median(widths) ** 2
                pull += weight * statistics.median(errors)
                precision += weight
        return pull / precision

    def _informative(self, group: str, cycles: Iterable[_Cycle]) -> list[_Cycle]:
        """Return the cycles in which the group takes a share of the time, as predicted."""
        informative = []
        for cycle in cycles:
            predicted = self._seconds[group][cycle.row]
            shorter = min(cycle.seconds[group], predicted)
            total = sum(cycle.seconds.values())
            if shorter > MIN_PHASE_SHARE * total:
                informative.append(cycle)
        return informative

    def _error(self, group: str, cycle: _Cycle) -> float:
        """Return e_g."""
        predicted = self._seconds[group][cycle.row]
        return math.log(cycle.seconds[group] / predicted)

    def _is_cliff(
        self,
        group: str,
        cycle: _Cycle,
        level: float,
    ) -> bool:
        if cycle.deviation:
            return False
        width = self._widths[group][cycle.row]
        bound = max(math.log(CLIFF_FACTOR), CLIFF_FACTOR * width)
        return bool(self._error(group, cycle) - level > bound)

    def _error_posterior(
        self,
        group: str,
        cycles: Sequence[_Cycle],
        level: float,
        noise: float,
        pending: IndexArray,
    ) -> Posterior:
        """Return the posterior of d_g."""
        # 1. The usual errors, and those of outliers.
        rows = []
        errors = []
        deviations = []
        cliffs: list[tuple[int, float]] = []
        for cycle in self._informative(group, cycles):
            error = self._error(group, cycle) - level
            if self._is_cliff(group, cycle, level):
                cliffs.append((cycle.row, error))
            else:
                rows.append(cycle.row)
                errors.append(error)
                deviations.append(cycle.deviation)
        observed = Observations(
            rows=np.array(rows, dtype=np.int64),
            residual=np.array(errors),
            variance=np.array(deviations) ** 2,
        )
        posterior = self._regressions[group].posterior(observed, pending, (noise,))

        # 2. An outlier's error applies to every candidate of its load that was not measured without
        # it.
        mean = posterior.mean.copy()
        loads = self._table.loads
        unmeasured = np.ones(len(mean), dtype=bool)
        unmeasured[observed.rows] = False
        for row, error in cliffs:
            same_load = loads == loads[row]
            mean[same_load & unmeasured] = error
            mean[row] = error
        return replace(posterior, mean=mean)


class CycleModel:
    """Speed by one figure per cycle, where it was not predicted by phase, or not at all."""

    def __init__(self, table: CandidateTable, predictions: Predictions) -> None:
        self._table = table
        self._predicted = np.zeros(len(predictions), dtype=bool)
        logs = np.zeros(len(predictions))
        width = np.full(len(predictions), UNPREDICTED_SPEED_WIDTH)
        for row, prediction in enumerate(predictions):
            rate = None if prediction is None else prediction.ranking_rate
            if rate is not None:
                self._predicted[row] = True
                logs[row] = math.log(rate.value)
                width[row] = max(interval_width(rate), MIN_PHASE_WIDTH)
        middle = 0.0
        if self._predicted.any():
            middle = statistics.fmean(logs[self._predicted])
        guess = middle + SPEED_PER_DOUBLING * table.steps
        self._prior = np.where(self._predicted, logs, guess)
        kernels = Kernels(table)
        self._regression = Regression(kernels, width, (UNKNOWN_DEVIATION,), SPEED_STRUCTURES)

    def posterior(
        self,
        trials: Sequence[Trial],
        pending: IndexArray,
        noise: float,
    ) -> Posterior:
        """Return the posterior of log(tokens per second)."""
        logs_by_row: dict[int, list[float]] = {}
        for trial in trials:
            row = self._table.row_by_id.get(trial.candidate.id)
            speed = trial.measurement.ranking_speed
            if row is None or speed is None:
                continue
            if speed.tokens_per_second > 0:
                log_speed = math.log(speed.tokens_per_second)
                logs_by_row.setdefault(row, []).append(log_speed)
        measured = {}
        for row, logs in logs_by_row.items():
            measured[row] = statistics.fmean(logs)

        prior = self._centred_prior(measured)
        rows = np.array(list(measured), dtype=np.int64)
        speeds = np.array(list(measured.values()))
        residual = speeds - prior[rows]
        no_variance = np.zeros(len(measured))
        observed = Observations(rows, residual, no_variance)
        posterior = self._regression.posterior(observed, pending, (noise,))
        deviation = np.maximum(posterior.deviation, MIN_DEVIATION)
        mean = posterior.mean + prior
        return replace(posterior, mean=mean, deviation=deviation)

    def _centred_prior(self, measured: Mapping[int, float]) -> FloatArray:
        """Return the prior, with unpredicted speeds centred on the measured ones."""
        offsets = []
        for row, speed in measured.items():
            if not self._predicted[row]:
                offsets.append(speed - self._prior[row])
        if not offsets:
            return self._prior
        centred = self._prior + statistics.fmean(offsets)
        return np.where(self._predicted, self._prior, centred)


def median_scatter(trials: Iterable[Trial]) -> float | None:
    """Return the median scatter of single cycles within a probe; None if unknown."""
    scatters = []
    for trial in trials:
        speed = trial.measurement.ranking_speed
        if speed is not None and speed.scatter is not None:
            scatters.append(speed.scatter)
    return statistics.median(scatters) if scatters else None


def _weighted_covariance(
    covariances: Sequence[tuple[FloatArray, Covariance]], row: int
) -> FloatArray:
    """Return Σ_g w_g w_g[row] cov_g: errors of different groups are independent."""
    first_weight = covariances[0][0]
    total = np.zeros(len(first_weight))
    for weight, covariance_with in covariances:
        covariance = covariance_with(row)
        total += weight * weight[row] * covariance
    return total


def _split(speed: Speed) -> dict[str, float]:
    """Return the measured seconds of all timed cycles by group; empty without phases."""
    if not speed.phase_seconds:
        return {}
    timed_seconds = sum(speed.phase_seconds.values())
    seconds: dict[str, float] = {}
    for group, phases in PHASE_GROUPS.items():
        phase_seconds = [speed.phase_seconds.get(phase, 0.0) for phase in phases]
        seconds[group] = sum(phase_seconds)
    seconds[REST] = max(0.0, timed_seconds - sum(seconds.values()))
    return seconds


def _group_priors(predictions: Predictions, group: str) -> tuple[FloatArray, FloatArray]:
    """Return predicted seconds of the group, and the standard deviation of their error, by row.

    A candidate without a prediction (a baseline that cannot be traced) gets the median of the
    others.
    """
    seconds: list[float | None] = [None] * len(predictions)
    width = np.full(len(predictions), MAX_WIDTH)
    for row, prediction in enumerate(predictions):
        if prediction is None:
            continue
        estimate = _group_seconds(prediction, group)
        seconds[row] = estimate.value
        if group != REST:
            width[row] = _width(estimate)
    return _filled(seconds), width


def _group_seconds(prediction: Prediction, group: str) -> Estimate:
    """Sum the predicted seconds of a group; 0 for an unpredicted rest."""
    seconds_by_phase = prediction.seconds_at_lengths or prediction.seconds_by_phase
    total = Estimate.exactly(0.0)
    for phase, seconds in seconds_by_phase.items():
        if _group_of(phase) == group:
            total += seconds
    return total


def _group_of(phase: Phase) -> str:
    for group, phases in PHASE_GROUPS.items():
        if phase in phases:
            return group
    return REST


def _width(seconds: Estimate) -> float:
    if seconds.value <= 0:
        return MIN_PHASE_WIDTH
    width = max(MIN_PHASE_WIDTH, interval_width(seconds))
    return min(MAX_WIDTH, width)


def _is_timed(prediction: Prediction) -> bool:
    has_speed = prediction.tokens_per_second is not None
    return has_speed and bool(prediction.seconds_by_phase)


def _filled(figures: Sequence[float | None]) -> FloatArray:
    """Replace None by the median of the other figures."""
    filled = np.array(figures, dtype=float)  # None becomes NaN
    missing = np.isnan(filled)
    median = np.median(filled[~missing])
    filled[missing] = median
    return filled


def _log_figures(seconds: FloatArray) -> FloatArray | None:
    """Return None for a group that takes no time anywhere: it was not predicted."""
    longest = float(seconds.max())
    if longest <= 0:
        return None
    shortest = longest * MIN_PHASE_SHARE
    return np.asarray(np.log(np.maximum(seconds, shortest)))
