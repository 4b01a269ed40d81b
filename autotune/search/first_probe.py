"""First probe: the baseline, or another candidate where the budget pays for one of the two.

Every gain is measured against the baseline, so it usually comes first. But in a budget of minutes
it may be all that is measured: then the answer is what the user had. With b the baseline, and i the
candidate of its tier with the highest

    gain_i / probe_i^COST_EXPONENT      gain: `acquisition.expected_gains` over b
                                        probe: predicted seconds of a probe with its load

among those that are safe (P(fits) >= SAFE_CHANCE: after an out-of-memory error there would be no
answer), gain at least MIN_GAIN, and end within the budget, i is measured first if the
budget does not pay for it after the baseline:

    probe_b + probe_i + confirmation_i > budget

The baseline follows if there is time left.

Example: Qwen2.5-7B on an H200, 124 s left. The baseline takes 50 s, a candidate with vLLM 70 s and
15 s to confirm. It is predicted 2.6 times as fast, and 50 + 70 + 15 > 124: it is measured first.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.space import Candidate
from autotune.search.acquisition import COST_EXPONENT, expected_gains
from autotune.search.probe_cost import (
    LONG_PROBE,
    SHORT_PROBE,
    predicted_seconds,
    seconds_of_cycles,
)
from autotune.search.speed_comparison import MIN_GAIN
from autotune.search.trial_view import Tier, TrialView

SAFE_CHANCE = 0.95  # Chance of fitting from which a candidate is safe to begin with


@dataclass(frozen=True, kw_only=True)
class _ProbeSeconds:
    probe: float  # with its load
    confirmation: float  # on the same load


@dataclass(frozen=True, kw_only=True)
class _Paid:
    """Candidate whose probe ends within the budget."""

    candidate: Candidate
    seconds: _ProbeSeconds


def instead_of_baseline(view: TrialView, budget_seconds: float) -> Candidate | None:
    """Return the candidate to measure before the baseline; None for the baseline itself."""
    baseline = view.baseline
    is_first = not view.completed and not view.pending
    if baseline is None or not is_first or not view.problem.uses_surrogate:
        return None
    tier = view.problem.tier_of.get(baseline.id)
    baseline_seconds = _predicted_seconds(baseline, view)
    if tier is not view.tiers[0] or baseline_seconds is None:
        return None
    best = _best_paid(baseline, tier, view, budget_seconds)
    if best is None:
        return None
    needed_seconds = baseline_seconds.probe + best.seconds.probe + best.seconds.confirmation
    return best.candidate if needed_seconds > budget_seconds else None


def _best_paid(
    baseline: Candidate,
    tier: Tier,
    view: TrialView,
    budget_seconds: float,
) -> _Paid | None:
    """Return the safe candidate with the highest value whose probe ends within the budget."""
    pool = view.open_in(tier)
    pool = pool[view.estimates.fits[pool] >= SAFE_CHANCE]
    baseline_row = view.table.row_by_id[baseline.id]
    gains = expected_gains(view, baseline_row, pool)
    best: _Paid | None = None
    highest_value = 0.0
    for row, gain in zip(pool, gains, strict=True):
        candidate = view.table.candidates[row]
        seconds = _predicted_seconds(candidate, view)
        if gain < MIN_GAIN or seconds is None or seconds.probe > budget_seconds:
            continue
        value = gain / seconds.probe**COST_EXPONENT
        if value > highest_value:
            best = _Paid(candidate=candidate, seconds=seconds)
            highest_value = value
    return best


def _predicted_seconds(candidate: Candidate, view: TrialView) -> _ProbeSeconds | None:
    prediction = view.problem.predictions.get(candidate.id)
    if prediction is None:
        return None
    probe = predicted_seconds(prediction, SHORT_PROBE)
    confirmation = seconds_of_cycles(prediction, LONG_PROBE)
    if probe is None or confirmation is None:
        return None
    return _ProbeSeconds(probe=probe.value, confirmation=confirmation.value)
