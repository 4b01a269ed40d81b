"""Choice of the recommended candidate among those that fit.

The baseline is kept unless the fastest candidate is faster by more than the spread between runs, and
a longer probe confirmed it. Among confirmed candidates with the same speed within that spread, the
simplest is taken.
"""

from __future__ import annotations

from dataclasses import replace

from autotune.catalog.simplicity import complexity
from autotune.core.answer import Advantage, AdvantageKind, Trial
from autotune.core.run_statistics import SpeedRatio
from autotune.search.trial_view import TrialView

MAX_SPEED_LOSS = 0.03  # Share of speed that a simpler candidate may lose, even where the spread between runs is larger
# Difference of predicted speeds, as a share, that a prediction can't resolve: the part of a phase's error that its candidates
# do not have in common (`surrogate.throughput_model`).
EQUAL_SPEED_SHARE = 0.05


def choose(view: TrialView, *, finished: bool) -> tuple[Trial | None, Advantage | None]:
    """Return the recommended trial and its speed compared with the baseline's, if one was measured at the same learning knobs.
    In a search that is not `finished` the best so far need not be confirmed."""
    fastest = view.best()
    if fastest is None:
        return None, None
    baseline = view.fitting_baseline()
    if baseline is None:
        return _simplest(fastest, view), None
    if baseline.candidate == fastest.candidate or (ratio := compare(fastest, baseline, view)) is None:
        return fastest, None
    unconfirmed = finished and fastest.candidate.id not in view.confirmations
    if ratio.low <= 1.0 or unconfirmed:
        why: AdvantageKind = "within the noise" if ratio.low <= 1.0 else "not confirmed"
        return baseline, _advantage(fastest, ratio, why)
    winner = _simplest(fastest, view, baseline)
    return winner, _advantage(winner, compare(winner, baseline, view) or ratio, "measurably faster")


def _advantage(trial: Trial, ratio: SpeedRatio, why: AdvantageKind) -> Advantage:
    return Advantage(candidate_id=trial.candidate.id, why=why, ratio=ratio.value, low=ratio.low, high=ratio.high)


def compare(one: Trial, other: Trial, view: TrialView) -> SpeedRatio | None:
    """Return the ratio of the best evidence about two candidates; None without both speeds."""
    first, second = (view.confirmations.get(trial.candidate.id, trial).measurement.ranking_speed for trial in (one, other))
    if first is None or second is None:
        return None
    ratio = view.run_spread.compare(first, second)
    if not one.measurement.emulated:  # on emulated cards speeds are predicted, without a spread between runs
        return ratio
    return replace(ratio, low=ratio.value * (1 - EQUAL_SPEED_SHARE), high=ratio.value * (1 + EQUAL_SPEED_SHARE))


def _simplest(fastest: Trial, view: TrialView, baseline: Trial | None = None) -> Trial:
    """Return the simplest confirmed candidate that is as fast as the fastest, and measurably faster than the baseline."""
    alike = [
        trial
        for trial in as_fast_as(fastest, view)
        if trial.candidate.id in view.confirmations
        and (baseline is None or (ratio := compare(trial, baseline, view)) is None or ratio.low > 1.0)
    ]
    return min([fastest, *alike], key=lambda trial: complexity(trial.candidate, view.baseline))


def as_fast_as(fastest: Trial, view: TrialView) -> list[Trial]:
    """Return the other trials of the tier that are as fast as the fastest confirmed one within the spread."""
    tier = view.tier_of_choice()
    if tier is None or fastest.candidate.id not in view.confirmations:
        return []
    others = [trial for trial in view.contenders(tier) if trial.candidate != fastest.candidate]
    pairs = ((trial, compare(fastest, trial, view)) for trial in others)
    return [trial for trial, ratio in pairs if ratio and ratio.low <= 1.0 and ratio.value <= 1 + MAX_SPEED_LOSS]
