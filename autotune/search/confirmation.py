"""Confirmation: finalists are measured again, longer and in turns, before one is recommended.

Idea: the fastest of many short probes is partly lucky. Longer probes of the few fastest, each in
turns, find the one that is fast. `next_confirmation` decides in this order:

    1. the fastest by estimate, which always takes place
    2. the baseline and its fastest rival, while their measurements do not decide between them and
       the pairs that would decide pay off
    3. another candidate, not confirmed yet, that may be faster than the best
    4. the simplest candidate that is as fast as the fastest: it would be the recommendation
    5. any of these again, while one more turn of it may change which is the best

All take place while time allows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autotune.catalog import complexity
from autotune.core.answer import Trial
from autotune.core.run_statistics import SpeedRatio
from autotune.core.space import Candidate
from autotune.search.predicted_order import unconfirmed_choice
from autotune.search.speed_comparison import as_fast_as, compare, evident_speed
from autotune.search.surrogate.gaussian_process import expected_improvement
from autotune.search.trial_view import TrialView

# Training in which every measurement has to pay off, two days: one of two minutes does with an
# expected logarithmic gain of 0.0007
TRAINING_SECONDS = 172_800.0
# Share of speed that any measurement has to promise, whatever it costs: where it takes seconds, the
# search would never end otherwise
LEAST_GAIN = 0.0005
PROBES_PER_CONFIRMATION = 2  # Usual probes whose time one confirmation takes at least
# With settling, varied lengths, checkpoint and evaluation: about 3 on an H200, 3.9 on an emulated
# H100 (benchmarks/results/first-light*)
MOST_PROBES_PER_CONFIRMATION = 4


def next_confirmation(view: TrialView, seconds: float) -> Candidate | None:
    """Return the next candidate to confirm within the remaining seconds; None at the end."""
    tier = view.tier_of_choice()
    if tier is None:
        return None
    if view.problem.predicted_rates:
        return unconfirmed_choice(view)
    contenders = view.contenders(tier)
    confirmed = [trial for trial in contenders if view.is_confirmed(trial.candidate)]
    if not confirmed:
        if view.rounds and not _has_time(view, seconds):
            return None
        fastest = max(contenders, key=view.log_speed)
        return fastest.candidate
    return (
        _unclear_rival(view, seconds)
        or _finalist(contenders, view, seconds, repeats=False)
        or _simpler_rival(view, seconds)
        or _finalist(contenders, view, seconds, repeats=True)
    )


def _finalist(
    contenders: Sequence[Trial],
    view: TrialView,
    seconds: float,
    *,
    repeats: bool,
) -> Candidate | None:
    """Return the contender whose next confirmation, with `repeats` or only its first one, has the
    highest expected gain; None if that does not pay off.

    With s the deviation of a belief and n the noise of a confirmation, the next one moves the
    belief by s² / √(s² + n²) (one standard deviation). It is a gain where another candidate becomes
    the best by it.
    """
    if not _has_time(view, seconds):
        return None
    best = view.best()
    if best is None or len(contenders) < 2:
        return None
    place_of_best = contenders.index(best)
    beliefs = np.array([view.belief(trial) for trial in contenders])
    means = beliefs[:, 0]
    deviations = beliefs[:, 1]

    # 1. Lead over the best; of the best: the lead of the second over it.
    leads = means - means[place_of_best]
    leads_of_rivals = np.delete(leads, place_of_best)
    second = leads_of_rivals.max()
    leads[place_of_best] = min(0.0, second)

    # 2. Gain by the next confirmation.
    noise = view.run_spread.deviation
    spread = np.hypot(deviations, noise)
    moves = deviations**2 / spread
    gains = expected_improvement(leads, moves, 0.0)
    for place, trial in enumerate(contenders):
        if not view.is_confirmed(trial.candidate):
            continue
        is_timed = evident_speed(trial, view) is not None
        if not repeats or not is_timed:  # another confirmation without a speed tells nothing
            gains[place] = 0.0
    highest = int(gains.argmax())
    share_of_training = _usual_seconds(view) / TRAINING_SECONDS
    if gains[highest] < max(share_of_training, LEAST_GAIN):
        return None
    return contenders[highest].candidate


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
    pairs = min(fastest_turns, baseline_turns)
    if pairs and not _pairs_pay_off(ratio, pairs, view):
        return None
    if not _has_time(view, seconds):
        return None
    if fastest_turns != baseline_turns:
        is_behind = baseline_turns < fastest_turns
    else:
        is_behind = pairs % 2 == 1
    return baseline.candidate if is_behind else fastest.candidate


def _pairs_pay_off(ratio: SpeedRatio, pairs: int, view: TrialView) -> bool:
    """Return True if the gain, should it last, pays in a training for the pairs that show it.

    With the gain g and the half width w of its interval after n pairs, w · √(n / m) is left after
    m: n · (w / g)² pairs show the gain.
    """
    gain = math.log(ratio.value)
    if gain <= 0:
        return False
    half_width = gain - math.log(ratio.low)
    needed_pairs = pairs * (half_width / gain) ** 2
    further_pairs = max(1.0, needed_pairs - pairs)
    further_seconds = 2 * further_pairs * _usual_seconds(view)
    return further_seconds <= gain * TRAINING_SECONDS


def _usual_seconds(view: TrialView) -> float:
    """Return the expected seconds of a confirmation on a load that is ready."""
    return PROBES_PER_CONFIRMATION * view.usual_seconds(load=False)


def _simpler_rival(view: TrialView, seconds: float) -> Candidate | None:
    """Return the simplest candidate as fast as the fastest confirmed one, if its own
    confirmation would make it the choice.
    """
    if not _has_time(view, seconds):
        return None
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
