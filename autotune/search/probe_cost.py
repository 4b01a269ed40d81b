"""Plans of the probes, and what a probe and a search of usual length are predicted to cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from autotune.catalog import efficiency
from autotune.core.measurement import ProbePlan
from autotune.core.prediction import Estimate, Prediction
from autotune.core.units import format_seconds

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


@dataclass(frozen=True, kw_only=True)
class ProbeCost:
    """Seconds of one short and of one long probe of the median candidate that may fit."""

    short: Estimate
    long: Estimate

    @property
    def search_seconds(self) -> float:
        """Seconds of a search of usual length."""
        short_seconds = SHORT_PROBES * self.short.value
        return short_seconds + LONG_PROBES * self.long.value

    def text(self, budget_seconds: float) -> str:
        """Return the cost in words, and how many probes the budget pays."""
        middle = format_seconds(self.short.value)
        low = format_seconds(self.short.low)
        high = format_seconds(self.short.high)
        short_seconds = budget_seconds - LONG_PROBES * self.long.value
        probes = max(0, int(short_seconds / self.short.value))
        return (
            f"A probe is predicted to take {middle} ({low} to {high}); a budget of"
            f" {format_seconds(budget_seconds)} pays about {probes} of them and {LONG_PROBES}"
            " longer ones."
        )


def probe_cost(predictions: Iterable[Prediction]) -> ProbeCost | None:
    """Return the expected cost; None if no speed is predicted."""
    costs = []
    for prediction in predictions:
        short = predicted_seconds(prediction, SHORT_PROBE)
        long = predicted_seconds(prediction, LONG_PROBE)
        if prediction.fits is not False and short is not None and long is not None:
            cost = ProbeCost(short=short, long=long)
            costs.append(cost)
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
    seconds: Estimate = efficiency("worker_start_seconds")
    if prediction.engine is not None:
        seconds += efficiency("engine_start_seconds")
    seconds += cycles
    return seconds.at_most(plan.deadline_seconds)


def seconds_of_cycles(prediction: Prediction, plan: ProbePlan) -> Estimate | None:
    """Return the seconds of a probe's cycles at the longest lengths, at which probes measure."""
    timed = prediction.seconds_by_phase.values()
    if not timed:
        return None
    cycle = sum(timed, start=Estimate.exactly(0))
    return cycle.scaled(plan.warmup_cycles + plan.timed_cycles)
