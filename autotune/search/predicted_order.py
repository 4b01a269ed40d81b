"""Order of measurements where speed is predicted and memory alone is measured: on emulated GPUs.

Speeds are known before the first probe, so a probe only shows whether its candidate fits. The
fastest one that is likely to fit is measured first. If it fits, no other can be better: what was
measured is confirmed once, and the baseline follows for comparison.
"""

from __future__ import annotations

from autotune.catalog import complexity
from autotune.core.space import Candidate
from autotune.search.speed_comparison import EQUAL_SPEED_SHARE, compare
from autotune.search.trial_view import Tier, TrialView, speed_of

LIKELY_CHANCE = 0.5  # Chance of fitting from which the fastest candidate is measured first


def fastest_by_prediction(tier: Tier, view: TrialView) -> Candidate | None:
    """Return the open candidate of the tier that is predicted fastest among those that are likely
    to fit; of equally fast ones the baseline, then the simplest. None if none is faster than what
    fits already, or if speed is measured.
    """
    # 1. Faster than what fits already, by more than a prediction resolves.
    rates = view.problem.predicted_rates
    if not rates:
        return None
    contenders = view.contenders(tier)
    best = max(map(speed_of, contenders), default=0.0)
    threshold = best * (1 + EQUAL_SPEED_SHARE)
    faster: list[Candidate] = []
    for row in view.open_in(tier):
        candidate = view.table.candidates[row]
        rate = rates.get(candidate.id, 0.0)
        chance = view.estimates.fits[row]
        if chance >= LIKELY_CHANCE and rate > threshold:
            faster.append(candidate)
    if not faster:
        return None

    # 2. The baseline or the simplest of the fastest.
    faster.sort(key=lambda candidate: rates[candidate.id], reverse=True)
    fastest = rates[faster[0].id]
    equals = []
    for candidate in faster:
        equal_rate = (1 - EQUAL_SPEED_SHARE) * fastest
        if rates[candidate.id] >= equal_rate:
            equals.append(candidate)

    def order(candidate: Candidate) -> tuple[bool, tuple[int, ...]]:
        is_other = candidate != view.baseline
        return is_other, complexity(candidate, view.baseline)

    return min(equals, key=order)  # among equally simple ones the fastest


def unconfirmed_choice(view: TrialView) -> Candidate | None:
    """Return the candidate that would be recommended, if no longer probe has confirmed it: the
    fastest, or the baseline where it is as fast.
    """
    fastest = view.best()
    baseline = view.fitting_baseline()
    if fastest is None:
        return None
    choice = fastest
    if baseline is not None:
        ratio = compare(fastest, baseline, view)
        if ratio is not None and ratio.low <= 1.0:
            choice = baseline
    if view.is_confirmed(choice.candidate):
        return None
    return choice.candidate
