"""Predicted cost of a probe, and of a search of usual length."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from autotune.catalog import efficiency
from autotune.core.measurement import ProbePlan
from autotune.core.prediction import Estimate, Prediction
from autotune.core.units import format_seconds
from autotune.search.loop import LONG_PROBE, SHORT_PROBE

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
        cycle = _cycle_seconds(prediction)
        if prediction.fits is not False and cycle is not None:
            short = _probe_seconds(cycle, SHORT_PROBE, prediction)
            long = _probe_seconds(cycle, LONG_PROBE, prediction)
            cost = ProbeCost(short=short, long=long)
            costs.append(cost)
    if not costs:
        return None

    def seconds(cost: ProbeCost) -> tuple[tuple[float, ...], ...]:
        return astuple(cost.short), astuple(cost.long)

    costs.sort(key=seconds)
    return costs[len(costs) // 2]


def _cycle_seconds(prediction: Prediction) -> Estimate | None:
    """Return the seconds of a cycle at the longest lengths, at which probes measure."""
    timed = prediction.seconds_by_phase.values()
    return sum(timed, start=Estimate.exactly(0)) if timed else None


def _probe_seconds(
    cycle: Estimate,
    plan: ProbePlan,
    prediction: Prediction,
) -> Estimate:
    seconds: Estimate = efficiency("worker_start_seconds")
    if prediction.engine is not None:
        seconds += efficiency("engine_start_seconds")
    cycles = plan.warmup_cycles + plan.timed_cycles
    seconds += cycle.scaled(cycles)
    return seconds.at_most(plan.deadline_seconds)
