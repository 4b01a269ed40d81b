"""Statistics of measured runs: spread of speed between runs, interference of concurrent probes.

**Spread.** The cycles of one run share its process, its memory layout and the state of the machine,
so their scatter does not show how far the next run of the same candidate is off.

    x_ij   log(median tokens per second) of run j of candidate i;  k_i: number of its runs
    s      median scatter of single cycles, over all runs of the study
    τ₀     RUN_PER_CYCLE · s, within bounds; ν₀ = PRIOR_FREEDOM
    τ²     (ν₀ τ₀² + Σ_ij (x_ij - x̄_i)²) / ν,   ν = ν₀ + Σ_i (k_i - 1)
    interval of a speed v measured in r runs:   v · exp(± t_ν · τ / √r)
    before any run was repeated:                v · exp(± UNREPEATED_WIDTH · t_ν · τ)

**Pairs.** Two candidates that were measured in turns, A B B A, are compared by the ratio within
each pair: what changes slowly on a shared or heating machine is the same for both.

    d_p    log(speed of A / speed of B) in pair p of n
    υ²     (ν₀ τ₀² + Σ_ij (x_ij - x_i,j-1)² / 2) / ν: τ² without slow changes of the machine
    σ²     (ν₀ 2 υ² + Σ_p (d_p - d̄)²) / ν,   ν = ν₀ + n - 1
    interval of the ratio: exp(d̄ ± t_ν · σ / √n)

The prior's constants are those of the repeated measurements in benchmarks/results, recomputed by
tests/search/test_run_spread.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autotune.core.measurement import Measurement, Speed
from autotune.core.units import counted

RUN_PER_CYCLE = 2.05
"""Standard deviation between runs divided by the scatter of single cycles: geometric mean of
1.3, 1.7, 2.5 and 3.2, in benchmarks/results/demo_sweep.json and search/table_*.json (three runs
of each of 130 candidates, on a CPU with other work on it).
"""

UNKNOWN_DEVIATION = 0.05
"""Standard deviation between runs where no run has two cycles: that of the candidates of
benchmarks/results/demo_sweep.json, three runs each."""

MIN_SPREAD = 0.005
MAX_SPREAD = 0.1
"""Bounds of the prior standard deviation."""

PRIOR_FREEDOM = 4.0
"""Weight of the prior, in repeated runs: these four ratios are as far apart as such few runs make
them.
"""

UNREPEATED_WIDTH = 2.5
"""Factor of a displayed interval until a run was repeated. A machine with other work changes
between two runs by more than the cycles of one run show: of the 200 pairs of a probe and its
confirmation in benchmarks/results/intervals.json, 176 intervals overlapped without the factor, and
199 do with it, as many as exact ones would.
"""

MEDIAN_ERROR = 1.4826 * math.sqrt(math.pi / 2)
"""Standard error of a median of n normal figures, times √n and divided by their median absolute
deviation.
"""

TWO_SIDED = 1.959964
"""Standard deviations of a normal distribution within which 95 % lie, on both sides."""

ONE_SIDED = 2.33
"""The same on one side for what a whole search claims. One look at one ratio would need 1.64, but a
search compares the fastest of several rivals, after each turn anew: with 2.0 the baseline lost to
one of three equal rivals in 25 of 250 simulated searches, with 2.33 in 7 of 150. Real gains are
found all the same, as pairs go on while the gain pays for them (`search.confirmation`): of 60
measured tables 14 ended below 95 % of the optimum with 2.0, 15 with 2.33.
"""


@dataclass(frozen=True, kw_only=True)
class SpeedRatio:
    """Speed of one candidate divided by another's. At the end of a search it exceeds `low` with
    95 % confidence, and falls below `high` with the same.
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class RunSpread:
    """Standard deviation of a candidate's log speed between runs."""

    deviation: float
    freedom: float  # degrees of freedom, the prior's included
    repeats: int  # repeated runs that it was learned from; 0: the prior alone
    # The same from one run of a candidate to its next, for pairs: slow changes cancel in them
    step_deviation: float

    def half_width(self, speed: Speed) -> float:
        """Return the relative half width of the 95 % interval of a measured speed."""
        width = _quantile(TWO_SIDED, self.freedom) * self._error(speed)
        if self.repeats == 0:
            width *= UNREPEATED_WIDTH
        return math.expm1(width)

    def compare(self, speed: Speed, reference: Speed) -> SpeedRatio:
        """Return the ratio of a speed to the reference."""
        ratio = speed.tokens_per_second / reference.tokens_per_second
        error = math.hypot(self._error(speed), self._error(reference))
        factor = math.exp(_quantile(ONE_SIDED, self.freedom) * error)
        return SpeedRatio(
            value=ratio,
            low=ratio / factor,
            high=ratio * factor,
        )

    def _error(self, speed: Speed) -> float:
        """Return the standard error of log speed: a run with unsteady cycles has a larger one.

        A single slow cycle moves their median little, so the median absolute deviation counts.
        """
        logs = [math.log(rate) for rate in speed.rates]
        median = statistics.median(logs)
        deviations = [abs(log - median) for log in logs]
        within_run = MEDIAN_ERROR * statistics.median(deviations) / math.sqrt(len(logs))
        return max(self.deviation / math.sqrt(speed.runs), within_run)


def compare_pairs(pairs: Sequence[tuple[Speed, Speed]], spread: RunSpread) -> SpeedRatio:
    """Return the ratio of two candidates' speeds from runs in pairs, at least one."""
    logs = []
    for speed, reference in pairs:
        logs.append(math.log(speed.tokens_per_second / reference.tokens_per_second))
    mean = statistics.fmean(logs)
    freedom = PRIOR_FREEDOM + len(logs) - 1
    squares = _squared_deviations(logs, mean)
    variance = (PRIOR_FREEDOM * 2 * spread.step_deviation**2 + squares) / freedom
    error = math.sqrt(variance / len(logs))
    factor = math.exp(_quantile(ONE_SIDED, freedom) * error)
    ratio = math.exp(mean)
    return SpeedRatio(
        value=ratio,
        low=ratio / factor,
        high=ratio * factor,
    )


def _quantile(z: float, freedom: float) -> float:
    """Return the quantile of Student's t that belongs to the normal one, by its expansion."""
    n = freedom
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)


def learn_run_spread(runs_by_candidate: Iterable[Sequence[Speed]]) -> RunSpread:
    """Return the spread from the runs of each candidate; runs that were cut short do not count."""
    scatters: list[float] = []
    squares = 0.0
    step_squares = 0.0
    repeats = 0
    # 1. Scatter of cycles within runs, and squared deviations between runs.
    for speeds in runs_by_candidate:
        runs = [run for run in speeds if not run.cut_short and run.tokens_per_second > 0]
        scatters += [run.scatter for run in runs if run.scatter is not None]
        if len(runs) > 1:
            logs = [math.log(run.tokens_per_second) for run in runs]
            squares += _squared_deviations(logs, statistics.fmean(logs))
            for earlier, later in pairwise(logs):
                step_squares += (later - earlier) ** 2 / 2
            repeats += len(logs) - 1
    # 2. The prior, and what the repeated runs make of it.
    prior = UNKNOWN_DEVIATION
    if scatters:
        prior = RUN_PER_CYCLE * statistics.median(scatters)
    prior = min(MAX_SPREAD, max(MIN_SPREAD, prior))
    freedom = PRIOR_FREEDOM + repeats
    prior_squares = PRIOR_FREEDOM * prior**2
    return RunSpread(
        deviation=math.sqrt((prior_squares + squares) / freedom),
        freedom=freedom,
        repeats=repeats,
        step_deviation=math.sqrt((prior_squares + step_squares) / freedom),
    )


def _squared_deviations(values: Iterable[float], mean: float) -> float:
    return sum((value - mean) ** 2 for value in values)


@dataclass(frozen=True, kw_only=True)
class Disturbance:
    """Speed of one candidate next to other probes, compared with its speed alone."""

    candidate_id: str
    beside: int  # other probes on the machine at the same time
    tokens_per_second_beside: float
    tokens_per_second_alone: float
    slower_share: float  # 1 - beside / alone; negative: faster
    uncertainty: float | None  # two standard errors of `slower_share`; None: too few cycles
    # Relative increase in seconds per cycle
    by_phase: Mapping[str, float] = field(default_factory=dict)

    @property
    def shows(self) -> bool:
        """True if the difference exceeds the scatter of single cycles."""
        return self.uncertainty is None or abs(self.slower_share) > self.uncertainty


def measure_interference(undisturbed: Measurement, disturbed: Measurement) -> Disturbance | None:
    """Compare two measurements; None if one has no speed or no probe ran next to the second."""
    quiet = undisturbed.worst
    busy = disturbed.worst
    if quiet is None or busy is None or not disturbed.beside:
        return None
    return Disturbance(
        candidate_id=disturbed.candidate_id,
        beside=disturbed.beside,
        tokens_per_second_beside=busy.tokens_per_second,
        tokens_per_second_alone=quiet.tokens_per_second,
        slower_share=1 - busy.tokens_per_second / quiet.tokens_per_second,
        uncertainty=_uncertainty(quiet, busy),
        by_phase=_increase_by_phase(quiet, busy),
    )


def _increase_by_phase(quiet: Speed, busy: Speed) -> dict[str, float]:
    """Return the relative increase in seconds per cycle, without phases below 1 % of a cycle."""
    total_seconds = sum(quiet.phase_seconds.values())
    increases: dict[str, float] = {}
    for phase, seconds in quiet.phase_seconds.items():
        if phase in busy.phase_seconds and seconds > 0.01 * total_seconds:
            quiet_seconds = seconds / len(quiet.cycle_seconds)
            busy_seconds = busy.phase_seconds[phase] / len(busy.cycle_seconds)
            increases[phase] = busy_seconds / quiet_seconds - 1
    return increases


def _uncertainty(quiet: Speed, busy: Speed) -> float | None:
    """Return 2 * sqrt(se_quiet^2 + se_busy^2) * v_busy / v_quiet, se: standard error of the mean
    log rate.
    """
    variances = []
    for speed in (quiet, busy):
        logs = [math.log(rate) for rate in speed.rates]
        count = len(logs)
        if count < 2:
            return None
        squares = _squared_deviations(logs, sum(logs) / count)
        variances.append(squares / (count - 1) / count)
    return 2 * math.sqrt(sum(variances)) * busy.tokens_per_second / quiet.tokens_per_second


def describe_interference(disturbance: Disturbance) -> str:
    """Return one sentence for the report; figures of finalists, measured alone, stay valid."""
    probes = counted(disturbance.beside, "other")
    direction = "slower" if disturbance.slower_share >= 0 else "faster"
    error = ""
    if disturbance.uncertainty is not None:
        error = f" ± {disturbance.uncertainty:.1%}"
    size = (
        f"{abs(disturbance.slower_share):.1%}{error} {direction} beside {probes} on its machine"
        " than alone"
    )
    if not disturbance.shows:
        size += ", which is within the scatter of its cycles"
    return f"Probes ran at the same time: one was {size}. The finalists were measured alone."
