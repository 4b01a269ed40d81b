"""Confirmation: finalists are measured again, longer and in turns, before one is recommended.

Idea: the fastest of many short probes is partly lucky. Longer probes of the few fastest, each in
turns, find the one that is fast. `next_confirmation` decides in this order:

    1. the baseline and its fastest rival, while their measurements do not decide between them
    2. the simplest candidate that is as fast as the fastest: it would be the recommendation
    3. any other candidate once that may still be faster than the best

The first confirmation of the leader always takes place, further ones while time allows.
"""

from __future__ import annotations

import numpy as np

from autotune.catalog import complexity
from autotune.core.answer import Trial
from autotune.core.space import Candidate
from autotune.search.predicted_order import unconfirmed_choice
from autotune.search.speed_comparison import MIN_GAIN, as_fast_as, compare
from autotune.search.surrogate.gaussian_process import expected_improvement
from autotune.search.trial_view import TrialView

# Expected logarithmic improvement over the leader from which a candidate is measured, and over the
# best from which a measured one is confirmed
MIN_EXPECTED_GAIN = 0.003
# Pairs of the baseline and the fastest candidate, as long as they do not decide between them
MAX_CONFIRMED_PAIRS = 8
PROBES_PER_CONFIRMATION = 2  # Usual probes whose time one confirmation takes
# Confirmations after the first take at most this share of the seconds that the search took.
MAX_TIME_SHARE = 0.5
# Share up to which a deciding turn, or that of a simpler candidate as fast as the fastest, is taken
MAX_DECISION_TIME_SHARE = 1.0


def next_confirmation(view: TrialView, seconds: float) -> Candidate | None:
    """Return the next candidate to confirm within the remaining seconds; None at the end."""
    if view.tier_of_choice() is None:
        return None
    if view.problem.predicted_rates:
        return unconfirmed_choice(view)
    rival = _unclear_rival(view, seconds)
    if rival is not None:
        return rival

    simpler = _simpler_rival(view)
    if simpler is not None and _affordable(view, seconds, MAX_DECISION_TIME_SHARE):
        return simpler

    if view.rounds and not _affordable(view, seconds, MAX_TIME_SHARE):
        return None
    return _finalist(view)


def _finalist(view: TrialView) -> Candidate | None:
    """Return the unconfirmed contender with the highest expected improvement over the best; the
    fastest by estimate is confirmed first.
    """
    tier = view.tier_of_choice()
    contenders = [] if tier is None else view.contenders(tier)
    open_contenders = []
    for trial in contenders:
        if not view.is_confirmed(trial.candidate):
            open_contenders.append(trial)
    if len(open_contenders) == len(contenders):
        fastest = max(contenders, key=view.log_speed)
        return fastest.candidate
    best = view.best()
    if best is None or not open_contenders:
        return None

    mean, deviation = view.belief(best)
    beliefs = np.array([view.belief(trial) for trial in open_contenders])
    lead = beliefs[:, 0] - mean
    improvement = expected_improvement(lead, np.hypot(beliefs[:, 1], deviation), 0.0)
    place = int(improvement.argmax())
    if improvement[place] < MIN_EXPECTED_GAIN:
        return None
    return open_contenders[place].candidate


def _unclear_rival(view: TrialView, seconds: float) -> Candidate | None:
    """Return the baseline or its fastest confirmed rival, whose turn it is, while the measurements
    don't decide between them and there is time. The turns are A B B A: what changes slowly on the
    machine is the same in both runs of a pair.
    """
    fastest = view.best()
    baseline = view.fitting_baseline()
    if fastest is None or baseline is None or fastest.candidate == baseline.candidate:
        return None
    ratio = compare(fastest, baseline, view)
    fastest_turns = view.confirmation_count(fastest.candidate)
    baseline_turns = view.confirmation_count(baseline.candidate)
    if ratio is None or ratio.low > 1.0 or not fastest_turns:
        return None
    is_gain = ratio.value >= 1 + MIN_GAIN
    pairs = min(fastest_turns, baseline_turns)
    if pairs and (not is_gain or pairs >= MAX_CONFIRMED_PAIRS):
        return None
    if not _has_time(view, seconds):
        return None
    if fastest_turns != baseline_turns:
        is_behind = baseline_turns < fastest_turns
    else:
        is_behind = pairs % 2 == 1
    return baseline.candidate if is_behind else fastest.candidate


def _simpler_rival(view: TrialView) -> Candidate | None:
    """Return the simplest candidate as fast as the fastest confirmed one, if its own
    confirmation would make it the choice.
    """
    fastest = view.best()
    rivals = [] if fastest is None else as_fast_as(fastest, view)
    if fastest is None or not rivals:
        return None
    candidates = [trial.candidate for trial in (fastest, *rivals)]

    def simplicity(candidate: Candidate) -> tuple[int, ...]:
        return complexity(candidate, view.baseline)

    simplest = min(candidates, key=simplicity)
    return None if view.is_confirmed(simplest) else simplest


def _has_time(view: TrialView, seconds: float) -> bool:
    """Return True if one more confirmation ends within these seconds."""
    further_probes = PROBES_PER_CONFIRMATION - 1  # on the same load
    needed = view.usual_seconds(load=True) + further_probes * view.usual_seconds(load=False)
    return seconds > needed


def _affordable(
    view: TrialView,
    seconds: float,
    share: float,
) -> bool:
    """Return True if all confirmations, with one more of the cheapest, take at most this share of
    the search's seconds, and there is time for it.
    """
    if not _has_time(view, seconds):
        return False
    searching = sum(map(_seconds_of, view.probes))
    confirming: list[float] = []
    for confirmations in view.rounds.values():
        confirming += map(_seconds_of, confirmations)
    confirmation_seconds = sum(confirming) + min(confirming)
    return confirmation_seconds <= share * searching


def _seconds_of(trial: Trial) -> float:
    return trial.measurement.cost.total_seconds
