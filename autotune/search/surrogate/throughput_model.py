"""Speed of each candidate by the phases of a cycle, each corrected by its measured seconds; the
cycle is their sum.

A micro-batch does not affect the engine, and an engine's memory share does not affect the backward
pass: the error measured in one candidate's rollout transfers to other rollouts. An error that the
phases have in common is the machine's (a card below its figures), and transfers to all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.answer import Trial
from autotune.core.measurement import Phase, Speed
from autotune.core.prediction import Estimate, Prediction
from autotune.search.surrogate.candidate_table import CandidateTable, FloatArray, IndexArray
from autotune.search.surrogate.gaussian_process import Kernels, Observations, Posterior, Regression
from autotune.search.surrogate.memory_model import interval_width
from autotune.worker.phase_recorder import SINGLE_CYCLE_FACTOR

GROUPS: Mapping[str, tuple[Phase, ...]] = {
    "rollout": ("rollout",),
    "sync": ("sync",),
    "training": ("score", "forward", "backward"),
}
"""Phases that are corrected together. The rest of a cycle is one further group."""

REST = "rest"
MIN_WIDTH, MAX_WIDTH = 0.15, 1.0  # Bounds of the standard deviation of a phase's logarithmic error
LEVEL_DEVIATION = (
    0.5  # Standard deviation of the logarithmic error that all phases of a machine have in common
)
# Shares of the prior variance: most of a phase's error is common to all candidates.
STRUCTURES = ((0.9, 0.08, 0.015, 0.005), (0.7, 0.25, 0.04, 0.01), (0.4, 0.45, 0.12, 0.03))
# Measured / predicted seconds, and standard deviations, beyond which a phase is an outlier of its
# load (a cache that holds one sequence at a time, for example), without evidence about other loads.
CLIFF_FACTOR = 3.0
NOISE = (0.01, 0.03, 0.07)  # Possible standard deviations between two measurements of one candidate
# A probe averages cycles, so its noise is at most the first, or this multiple of the scatter
# between single cycles.
MIN_NOISE_BOUND, NOISE_PER_SCATTER = 0.03, 3.0
# Standard deviation of a probe that was stopped after one cycle: maybe a disturbance of the machine
# was all that was slow.
SINGLE_CYCLE_DEVIATION = math.log(SINGLE_CYCLE_FACTOR)
MIN_SPEED_WIDTH = 0.15  # Lower bound of a predicted speed's standard deviation, as a share
UNPREDICTED_SPEED_WIDTH = (
    0.6  # Standard deviation of an unpredicted speed, around the measured ones
)
SPEED_PER_DOUBLING = 0.07  # Without predictions: logarithmic speed gained per doubling of memory
MIN_PHASE_SHARE = 1e-4  # Share of a cycle below which a phase carries no information


@dataclass(frozen=True)
class _Cycle:
    """Measured seconds of one cycle by group."""

    index: int  # Row of the candidate
    parts: Mapping[str, float]
    deviation: float  # Standard deviation of the logarithm, in addition to the common noise


class ThroughputModel:
    """Predicted seconds by phase, corrected by measured ones."""

    def __init__(self, table: CandidateTable, found: Sequence[Prediction | None]) -> None:
        self._table = table
        # A candidate without a prediction (a baseline that cannot be traced) gets the median of the
        # others.
        self._seconds = {
            name: _filled(
                [None if one is None else _group_seconds(one, name).value for one in found]
            )
            for name in (*GROUPS, REST)
        }
        self._widths = {
            name: np.array(
                [MAX_WIDTH if one is None else _width(_group_seconds(one, name)) for one in found]
            )
            for name in GROUPS
        }
        self._widths[REST] = np.full(len(found), MAX_WIDTH)
        # Passes of the trainer are the same code whatever generates: only generation's errors
        # differ by its kind.
        sources = {name: None if name == "training" else table.kinds for name in self._seconds}
        kernels = {
            name: Kernels(table, sources[name], _log_figures(seconds))
            for name, seconds in self._seconds.items()
        }
        self._regressions = {
            name: Regression(kernels[name], width, NOISE, STRUCTURES)
            for name, width in self._widths.items()
        }
        rates = [
            one.ranking_rate.value if one is not None and one.ranking_rate is not None else None
            for one in found
        ]
        self._tokens = _filled(rates) * sum(self._seconds.values())

    @classmethod
    def has_phase_times(cls, found: Sequence[Prediction | None]) -> bool:
        """Return True if every prediction has seconds by phase."""
        known = [one for one in found if one is not None]
        timed = (
            one.tokens_per_second is not None
            and any(phase.seconds is not None for phase in one.phases)
            for one in known
        )
        return bool(known) and all(timed)

    def posterior(self, trials: Sequence[Trial], pending: IndexArray) -> Posterior:
        """Posterior of log(tokens per second) = log(T / Σ t_g), with Var = Σ (t_g / t)² s_g²
        over the groups g.
        """
        cycles = {one.index: one for trial in trials if (one := self._cycle(trial))}
        scatter, level = median_scatter(trials), self._level(cycles.values())
        noise_bound = (
            math.inf if scatter is None else max(MIN_NOISE_BOUND, NOISE_PER_SCATTER * scatter)
        )
        noises = tuple(noise for noise in NOISE if noise <= noise_bound)
        parts = {
            name: self._corrected(name, tuple(cycles.values()), level, noises, pending)
            for name in self._seconds
        }
        corrected = {
            name: seconds * np.exp(level + parts[name].mean)
            for name, seconds in self._seconds.items()
        }
        total = np.asarray(sum(corrected.values()))
        weights = {name: seconds / total for name, seconds in corrected.items()}
        variance = sum((weights[name] * found.deviation) ** 2 for name, found in parts.items())

        def covariance_with(index: int) -> FloatArray:
            """Σ_g w_g w_g[index] cov_g: errors of different groups are independent."""
            return np.asarray(
                sum(
                    weights[name] * weights[name][index] * parts[name].covariance_with(index)
                    for name in parts
                )
            )

        noise = min(parts["rollout"].noise, parts["training"].noise)
        return Posterior(
            np.log(self._tokens / total),
            np.maximum(np.sqrt(variance), 1e-3),
            noise,
            covariance_with,
        )

    def _cycle(self, trial: Trial) -> _Cycle | None:
        index, speed = self._table.index.get(trial.candidate.id), trial.measurement.ranking_speed
        if (
            index is None
            or speed is None
            or speed.tokens_per_second <= 0
            or not speed.phase_seconds
        ):
            return None
        deviation = SINGLE_CYCLE_DEVIATION if speed.cut_short and len(speed.rates) == 1 else 0.0
        return _Cycle(
            index, _split(speed, self._tokens[index] / speed.tokens_per_second), deviation
        )

    def _level(self, cycles: Collection[_Cycle]) -> float:
        """Return the expected common error l of the phases; outliers of a load are no evidence for
        it.

        e_g = l + d_g, l ~ N(0, τ²), d_g ~ N(0, s_g²):  E[l] = Σ e_g / s_g² / (1 / τ² + Σ 1 / s_g²)
        """
        pull, precision = 0.0, 1 / LEVEL_DEVIATION**2
        for name in GROUPS:
            known = [
                one
                for one in self._known(name, cycles)
                if not self._is_cliff(name, one, 0.0) and not one.deviation
            ]
            if known:
                weight = 1 / statistics.median(self._widths[name][one.index] for one in known) ** 2
                pull += weight * statistics.median(self._error(name, one) for one in known)
                precision += weight
        return pull / precision

    def _known(self, name: str, cycles: Iterable[_Cycle]) -> list[_Cycle]:
        seconds = self._seconds[name]
        return [
            one
            for one in cycles
            if min(one.parts[name], seconds[one.index]) > MIN_PHASE_SHARE * sum(one.parts.values())
        ]

    def _error(self, name: str, one: _Cycle) -> float:
        return math.log(one.parts[name] / self._seconds[name][one.index])

    def _is_cliff(self, name: str, one: _Cycle, level: float) -> bool:
        bound = max(math.log(CLIFF_FACTOR), CLIFF_FACTOR * self._widths[name][one.index])
        return not one.deviation and self._error(name, one) - level > bound

    def _corrected(
        self,
        name: str,
        cycles: Sequence[_Cycle],
        level: float,
        noises: tuple[float, ...],
        pending: IndexArray,
    ) -> Posterior:
        known = self._known(name, cycles)
        indices = np.array([one.index for one in known], dtype=np.int64)
        error = np.array([self._error(name, one) - level for one in known])
        deviation = np.array([one.deviation for one in known])
        cliff = np.array([self._is_cliff(name, one, level) for one in known], dtype=bool)
        usual = Observations(indices[~cliff], error[~cliff], deviation[~cliff] ** 2)
        found = self._regressions[name].posterior(usual, pending, noises)
        # An outlier's error applies to every candidate of its load that was not measured without
        # it.
        mean, loads = found.mean.copy(), self._table.loads
        measured = np.isin(np.arange(len(mean)), indices[~cliff])
        for index, distance in zip(indices[cliff], error[cliff], strict=True):
            mean[(loads == loads[index]) & ~measured] = distance
            mean[index] = distance
        return replace(found, mean=mean)


class CycleModel:
    """Speed by one figure per cycle, where it was not predicted by phase, or not at all."""

    def __init__(self, table: CandidateTable, found: Sequence[Prediction | None]) -> None:
        self._table = table
        rates = [None if one is None else one.ranking_rate for one in found]
        self._known = np.array([rate is not None for rate in rates], dtype=bool)
        known = [math.log(rate.value) for rate in rates if rate is not None]
        middle = statistics.fmean(known) if known else 0.0
        self._prior = np.array([middle if rate is None else math.log(rate.value) for rate in rates])
        self._prior += np.where(self._known, 0.0, SPEED_PER_DOUBLING * table.steps)
        width = np.array(
            [
                (
                    UNPREDICTED_SPEED_WIDTH
                    if rate is None
                    else max(interval_width(rate), MIN_SPEED_WIDTH)
                )
                for rate in rates
            ]
        )
        self._regression = Regression(Kernels(table), width, NOISE)

    def posterior(self, trials: Sequence[Trial], pending: IndexArray) -> Posterior:
        rates: dict[int, list[float]] = {}
        for trial in trials:
            index, speed = (
                self._table.index.get(trial.candidate.id),
                trial.measurement.ranking_speed,
            )
            if index is not None and speed is not None and speed.tokens_per_second > 0:
                rates.setdefault(index, []).append(math.log(speed.tokens_per_second))
        means = {index: statistics.fmean(many) for index, many in rates.items()}
        prior = self._prior
        if means and not self._known.all():
            # Unpredicted speeds are centred on the measured ones.
            offsets = [
                rate - prior[index] for index, rate in means.items() if not self._known[index]
            ]
            prior = np.where(self._known, prior, prior + statistics.fmean(offsets or [0.0]))
        residual = np.array([rate - prior[index] for index, rate in means.items()])
        observed = Observations(
            np.array(list(means), dtype=np.int64), residual, np.zeros(len(means))
        )
        found = self._regression.posterior(observed, pending)
        return replace(found, mean=found.mean + prior, deviation=np.maximum(found.deviation, 1e-3))


def median_scatter(trials: Iterable[Trial]) -> float | None:
    """Return the median scatter of single cycles within a probe; None if unknown."""
    speeds = [speed for trial in trials if (speed := trial.measurement.ranking_speed) is not None]
    inside = [scatter for speed in speeds if (scatter := speed.scatter) is not None]
    return statistics.median(inside) if inside else None


def _split(speed: Speed, cycle: float) -> Mapping[str, float]:
    """Divide a cycle's seconds by group, in the proportions of all timed cycles."""
    whole = sum(speed.phase_seconds.values())
    parts = {
        name: sum(speed.phase_seconds.get(phase, 0.0) for phase in phases)
        for name, phases in GROUPS.items()
    }
    parts[REST] = max(0.0, whole - sum(parts.values()))
    return {name: seconds / whole * cycle for name, seconds in parts.items()}


def _filled(figures: Sequence[float | None]) -> FloatArray:
    """Replace None by the median of the other figures."""
    middle = statistics.median([figure for figure in figures if figure is not None])
    return np.array([middle if figure is None else figure for figure in figures])


def _log_figures(seconds: FloatArray) -> FloatArray | None:
    """Return None for a group that takes no time anywhere: it was not predicted."""
    return (
        np.log(np.maximum(seconds, seconds.max() * MIN_PHASE_SHARE)) if seconds.max() > 0 else None
    )


def _group_seconds(one: Prediction, name: str) -> Estimate:
    """Sum the predicted seconds of a group; 0 for an unpredicted rest."""
    named = {phase for phases in GROUPS.values() for phase in phases}
    known = one.seconds_at_lengths or {
        phase.name: phase.seconds for phase in one.phases if phase.seconds is not None
    }
    members = [
        seconds
        for phase, seconds in known.items()
        if (phase in GROUPS[name] if name in GROUPS else phase not in named)
    ]
    return sum(members, start=Estimate.exactly(0.0))


def _width(one: Estimate) -> float:
    return MIN_WIDTH if one.value <= 0 else min(MAX_WIDTH, max(MIN_WIDTH, interval_width(one)))
