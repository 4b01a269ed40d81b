"""Spread of a candidate's speed between runs, and the interval of a measured speed.

The cycles of one run share its process, its memory layout and the state of the machine, so their
scatter does not show how far the next run of the same candidate is off.

    x_ij   log(median tokens per second) of run j of candidate i;  k_i: number of its runs
    s      median scatter of single cycles, over all runs of the study
    τ₀     RUN_PER_CYCLE · s, within bounds; ν₀ = PRIOR_FREEDOM
    τ²     (ν₀ τ₀² + Σ_ij (x_ij - x̄_i)²) / ν,   ν = ν₀ + Σ_i (k_i - 1)
    interval of a speed v measured in r runs:   v · exp(± t_ν · τ / √r)

The prior's constants are those of the repeated measurements in benchmarks/results, recomputed by
tests/search/test_run_spread.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.core.measurement import Speed

RUN_PER_CYCLE = 2.05
"""Standard deviation between runs divided by the scatter of single cycles: geometric mean of 1.3, 1.7,
2.5 and 3.2, in benchmarks/results/demo_sweep.json and search/table_*.json (three runs of each of 130
candidates, on a CPU with other work on it)."""

UNKNOWN_DEVIATION = 0.05
"""Standard deviation between runs where no run has two cycles: that of the candidates of
benchmarks/results/demo_sweep.json, three runs each."""

MIN_DEVIATION, MAX_DEVIATION = 0.005, 0.1  # bounds of the prior standard deviation
PRIOR_FREEDOM = 4.0  # weight of the prior, in repeated runs: these four ratios are as far apart as such few runs make them
MEDIAN_ERROR = 1.4826 * math.sqrt(math.pi / 2)
"""Standard error of a median of n normal figures, times √n and divided by their median absolute deviation."""

TWO_SIDED, ONE_SIDED = 1.959964, 1.644854
"""Standard deviations of a normal distribution within which 95 % lie: on both sides, on one side."""


@dataclass(frozen=True, kw_only=True)
class SpeedRatio:
    """Speed of one candidate divided by another's. It exceeds `low` with 95 % confidence, and falls
    below `high` with the same."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class RunSpread:
    """Standard deviation of a candidate's log speed between runs."""

    deviation: float
    freedom: float  # degrees of freedom, the prior's included
    repeats: int  # repeated runs that it was learned from; 0: the prior alone

    def half_width(self, speed: Speed) -> float:
        """Return the relative half width of the 95 % interval of a measured speed."""
        return math.expm1(self._quantile(TWO_SIDED) * self._error(speed))

    def compare(self, one: Speed, other: Speed) -> SpeedRatio:
        """Return the ratio of two speeds."""
        ratio = one.tokens_per_second / other.tokens_per_second
        factor = math.exp(self._quantile(ONE_SIDED) * math.hypot(self._error(one), self._error(other)))
        return SpeedRatio(value=ratio, low=ratio / factor, high=ratio * factor)

    def _error(self, speed: Speed) -> float:
        """Standard error of log speed: a run with unsteady cycles has a larger one. A single slow
        cycle moves their median little, so the median absolute deviation counts."""
        logs = [math.log(rate) for rate in speed.rates]
        middle = statistics.median(logs)
        within = MEDIAN_ERROR * statistics.median(abs(one - middle) for one in logs) / math.sqrt(len(logs))
        return max(self.deviation / math.sqrt(speed.runs), within)

    def _quantile(self, z: float) -> float:
        """Return the quantile of Student's t that belongs to the normal one, by its expansion."""
        n = self.freedom
        return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def learn_run_spread(runs_by_candidate: Iterable[Sequence[Speed]]) -> RunSpread:
    """Return the spread from the runs of each candidate; runs that were cut short do not count."""
    groups = [[run for run in runs if not run.cut_short and run.tokens_per_second > 0] for runs in runs_by_candidate]
    scatters = [run.scatter for runs in groups for run in runs if run.scatter is not None]
    prior = RUN_PER_CYCLE * statistics.median(scatters) if scatters else UNKNOWN_DEVIATION
    prior = min(MAX_DEVIATION, max(MIN_DEVIATION, prior))
    squares, repeats = 0.0, 0
    for runs in groups:
        logs = [math.log(run.tokens_per_second) for run in runs]
        if len(logs) > 1:
            mean = statistics.fmean(logs)
            squares += sum((one - mean) ** 2 for one in logs)
            repeats += len(logs) - 1
    freedom = PRIOR_FREEDOM + repeats
    deviation = math.sqrt((PRIOR_FREEDOM * prior**2 + squares) / freedom)
    return RunSpread(deviation=deviation, freedom=freedom, repeats=repeats)
