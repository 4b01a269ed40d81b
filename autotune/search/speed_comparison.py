"""Comparison of measured speeds: which differences count.

    within the spread   the ratio of two speeds is 1, or less, at the lower end of its interval
    as fast as          within the spread, and at most MAX_SPEED_LOSS slower, by the pairs and by
                        all that was measured

Two confirmed candidates are compared in the pairs of their turns. A candidate's other evidence is
its confirmations together, or its probe where it has none.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autotune.core.answer import Trial
from autotune.core.measurement import Speed
from autotune.core.run_statistics import SpeedRatio, compare_pairs
from autotune.search.trial_view import TrialView

MIN_GAIN = 0.02  # Smallest share of speed that counts as an improvement
# Share of speed that a simpler candidate may lose, even where the spread between runs is larger
MAX_SPEED_LOSS = 0.03
# Difference of predicted speeds, as a share, that a prediction can't resolve: the part of a phase's
# error that its candidates do not have in common (`surrogate.throughput_model`).
EQUAL_SPEED_SHARE = 0.05


def compare(
    trial: Trial,
    reference: Trial,
    view: TrialView,
) -> SpeedRatio | None:
    """Return the ratio of the best evidence about two candidates; None without both speeds."""
    speed = evident_speed(trial, view)
    reference_speed = evident_speed(reference, view)
    if speed is None or reference_speed is None:
        return None
    pairs = view.pairs(trial.candidate, reference.candidate)
    ratio = view.run_spread.compare(speed, reference_speed)
    if pairs:
        ratio = compare_pairs(pairs, view.run_spread)
    if not trial.measurement.emulated:
        return ratio
    # On emulated cards speeds are predicted, without a spread between runs.
    return replace(
        ratio,
        low=ratio.value * (1 - EQUAL_SPEED_SHARE),
        high=ratio.value * (1 + EQUAL_SPEED_SHARE),
    )


def evident_speed(trial: Trial, view: TrialView) -> Speed | None:
    return view.evidence(trial).measurement.ranking_speed


def as_fast_as(fastest: Trial, view: TrialView) -> list[Trial]:
    """Return the other trials of the tier that are as fast as the fastest confirmed one within
    the spread.
    """
    tier = view.tier_of_choice()
    if tier is None or not view.is_confirmed(fastest.candidate):
        return []
    equals = []
    for trial in view.contenders(tier):
        if trial.candidate == fastest.candidate:
            continue
        lead = compare(fastest, trial, view)
        if lead is None or lead.low > 1.0:
            continue
        # A pair on a busy machine may hide what the other probes have shown.
        believed = math.exp(view.log_speed(fastest) - view.log_speed(trial))
        if max(lead.value, believed) <= 1 + MAX_SPEED_LOSS:
            equals.append(trial)
    return equals
