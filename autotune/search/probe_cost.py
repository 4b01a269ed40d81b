"""Expected time of the probes of a search on GPUs, before the first one has been measured.

probe = start of a worker + start of an engine, if there is one + timed and untimed generation cycles
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from autotune.catalog.constants import efficiency
from autotune.core.measurement import ProbePlan
from autotune.core.prediction import Estimate, Prediction
from autotune.core.units import format_seconds

SHORT_PROBES, LONG_PROBES = 10, 3
"""Probes after which a search is near its optimum, and confirmations (benchmarks/results/search.md)."""


@dataclass(frozen=True, kw_only=True)
class ProbeCost:
    """Seconds of one short and of one long probe of the median candidate that may fit."""

    short: Estimate
    long: Estimate

    @property
    def search_seconds(self) -> float:
        """Seconds of a search of usual length."""
        return SHORT_PROBES * self.short.value + LONG_PROBES * self.long.value

    def text(self, budget_seconds: float) -> str:
        """Return the cost in words, and how many probes the budget pays."""
        low, middle, high = (format_seconds(each) for each in (self.short.low, self.short.value, self.short.high))
        probes = max(0, int((budget_seconds - LONG_PROBES * self.long.value) / self.short.value))
        return (
            f"A probe is predicted to take {middle} ({low} to {high}); a budget of {format_seconds(budget_seconds)} pays about "
            f"{probes} of them and {LONG_PROBES} longer ones."
        )


def probe_cost(predictions: Iterable[Prediction], short: ProbePlan, long: ProbePlan) -> ProbeCost | None:
    """Return the expected cost; None if no speed is predicted."""
    costs = [
        ProbeCost(short=_seconds(cycle, short, one), long=_seconds(cycle, long, one))
        for one in predictions
        if one.fits is not False and (cycle := _cycle(one)) is not None
    ]
    return sorted(costs, key=lambda cost: (astuple(cost.short), astuple(cost.long)))[len(costs) // 2] if costs else None


def _cycle(one: Prediction) -> Estimate | None:
    """Return the seconds of a cycle at the longest lengths, at which probes measure."""
    known = [phase.seconds for phase in one.phases if phase.seconds is not None]
    return sum(known, start=Estimate.exactly(0)) if known else None


def _seconds(cycle: Estimate, plan: ProbePlan, one: Prediction) -> Estimate:
    started = efficiency("worker_start_seconds")
    engine = efficiency("engine_start_seconds") if one.engine is not None else Estimate.exactly(0)
    total = started + engine + cycle.scaled(plan.warmup_cycles + plan.timed_cycles)
    limit = plan.deadline_seconds
    return total.at_most(limit)
