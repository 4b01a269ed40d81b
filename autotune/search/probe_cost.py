"""Plans of the probes, and what a probe and a search of usual length are predicted to cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from autotune.catalog import efficiency
from autotune.core.measurement import ProbePlan
from autotune.core.prediction import Estimate, Prediction
from autotune.core.units import counted, format_seconds

# Probe that decides fit and estimates the speed; probe of one confirmation round.
SHORT_PROBE = ProbePlan(
    optimizer_steps=2,
    warmup_cycles=1,
    timed_cycles=3,
    settling_cycles=2,
    reuse_rollouts=True,
)
LONG_PROBE = ProbePlan(
    optimizer_steps=4,
    warmup_cycles=1,
    timed_cycles=5,
    settling_cycles=4,
    varied_lengths=True,
    save_checkpoint=True,
    evaluate=True,
)

SHORT_PROBES = 10
LONG_PROBES = 3
"""Probes after which a search is near its optimum, and confirmations
(benchmarks/results/search.md).
"""

LOADS = 2
"""Most searches load twice: the baseline's model, and the one with an engine."""


@dataclass(frozen=True, kw_only=True)
class ProbeCost:
    """Seconds of one short and of one long probe of the median candidate that may fit."""

    short: Estimate
    long: Estimate
    load: Estimate  # part of both: model and engine are started. Later probes use what is loaded

    @property
    def search_seconds(self) -> float:
        """Seconds of a search of usual length."""
        short_seconds = SHORT_PROBES * self.short.value
        return short_seconds + LONG_PROBES * self.long.value

    def text(self, budget_seconds: float) -> str:
        """Return the cost in words, and how many probes the budget pays."""
        short_seconds = self.short.value - self.load.value
        long_seconds = self.long.value - self.load.value
        short_budget_seconds = budget_seconds - LOADS * self.load.value - LONG_PROBES * long_seconds
        probes = max(0, int(short_budget_seconds / max(1, short_seconds)))
        low = format_seconds(self.short.low)
        high = format_seconds(self.short.high)
        return (
            f"A probe is predicted to take {format_seconds(self.short.value)} ({low} to {high})"
            f" with loading, {format_seconds(short_seconds)} where model and engine are loaded; a"
            f" budget of {format_seconds(budget_seconds)} pays for {LOADS} loads,"
            f" {counted(probes, 'short probe')} and {LONG_PROBES} confirmations."
        )


def probe_cost(predictions: Iterable[Prediction]) -> ProbeCost | None:
    """Return the expected cost; None if no speed is predicted."""
    costs = []
    for prediction in predictions:
        short = predicted_seconds(prediction, SHORT_PROBE)
        long = predicted_seconds(prediction, LONG_PROBE)
        if prediction.fits is not False and short is not None and long is not None:
            load = _load_seconds(prediction).at_most(short.value)
            costs.append(ProbeCost(short=short, long=long, load=load))
    if not costs:
        return None

    def seconds(cost: ProbeCost) -> tuple[tuple[float, ...], ...]:
        return astuple(cost.short), astuple(cost.long)

    costs.sort(key=seconds)
    return costs[len(costs) // 2]


def predicted_seconds(prediction: Prediction, plan: ProbePlan) -> Estimate | None:
    """Return the seconds of a probe with its load; None if no speed is predicted."""
    cycles = seconds_of_cycles(prediction, plan)
    if cycles is None:
        return None
    seconds = _load_seconds(prediction) + cycles
    return seconds.at_most(plan.deadline_seconds)


def _load_seconds(prediction: Prediction) -> Estimate:
    seconds: Estimate = efficiency("worker_start_seconds")
    if prediction.engine is not None:
        seconds += efficiency("engine_start_seconds")
    return seconds


def seconds_of_cycles(prediction: Prediction, plan: ProbePlan) -> Estimate | None:
    """Return the seconds of a probe's cycles at the longest lengths, at which probes measure."""
    timed = prediction.seconds_by_phase.values()
    if not timed:
        return None
    cycle = sum(timed, start=Estimate.exactly(0))
    return cycle.scaled(plan.warmup_cycles + plan.timed_cycles)
