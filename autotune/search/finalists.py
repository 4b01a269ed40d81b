"""Finalists: candidates that are measured again, longer and in turns, before one is recommended."""

from __future__ import annotations

import numpy as np

from autotune.catalog.simplicity import complexity
from autotune.core.answer import Trial
from autotune.core.space import Candidate
from autotune.search.choice import as_fast_as, compare
from autotune.search.surrogate.acquisition import MIN_GAIN
from autotune.search.surrogate.gaussian_process import expected_improvement
from autotune.search.tiers import Tier
from autotune.search.trial_view import TrialView, speed_of

MAX_FINALISTS = 3
MIN_EXPECTED_GAIN = 0.004  # Expected logarithmic improvement over the leader from which a candidate is a finalist too
ROUNDS = 2  # Turns of each finalist, so that a temporarily slow machine slows all of them
MAX_BASELINE_ROUNDS = 3  # Turns of the baseline and of the fastest candidate, where two do not decide between them
# A finalist leaves after a round if it is behind the leader by more than a probe's noise, within these bounds.
MIN_CLOSE_SHARE, MAX_CLOSE_SHARE = 0.01, 0.05
# Share of the search's seconds up to which a deciding turn, or that of a simpler candidate as fast as the fastest, is taken.
MAX_DECISION_TIME_SHARE = 1.0
MAX_TIME_SHARE = 0.5  # Confirmations after the first take at most this share of the seconds that the search took


def next_confirmation(view: TrialView, seconds: float) -> Candidate | None:
    """Return the next finalist to measure: always the leader once, the others and further rounds while time allows."""
    tier = view.tier_of_choice()
    if tier is None:
        return None
    finalists = _finalists(view, tier)
    if (rival := _unclear_rival(view, seconds)) is not None:
        return rival
    if (simpler := _simpler_rival(view)) is not None and _affordable(view, seconds, MAX_DECISION_TIME_SHARE):
        return simpler
    if any(trial.candidate.id in view.rounds for trial in finalists) and not _affordable(view, seconds):
        return None
    for number in range(ROUNDS):
        for trial in _turns(finalists, number, view):
            if len(view.rounds.get(trial.candidate.id, ())) <= number:
                return trial.candidate
    return None


def _finalists(view: TrialView, tier: Tier) -> list[Trial]:
    """Return the contenders by estimated speed, which one lucky probe moves less than a ranking by measured speed."""
    contenders = view.contenders(tier)
    lead, deviation = view.lead_over(contenders, view.leader(contenders))
    gains = expected_improvement(lead, deviation, 0.0)
    gains[int(lead.argmax())] = np.inf
    order = [int(row) for row in np.argsort(-gains, kind="stable")[:MAX_FINALISTS]]
    chosen = [contenders[row] for row in order if gains[row] > MIN_EXPECTED_GAIN]
    # Add contenders whose probe was faster than every confirmation: either of the two may have been luck.
    confirmed = [speed_of(view.confirmations[one.candidate.id]) for one in contenders if one.candidate.id in view.confirmations]
    bar = (1 + _close_share(view)) * max(confirmed, default=float("inf"))
    among = {trial.candidate.id for trial in chosen}
    faster = [trial for trial in contenders[:MAX_FINALISTS] if speed_of(trial) > bar]
    return [*chosen, *(trial for trial in faster if trial.candidate.id not in among)]


def _unclear_rival(view: TrialView, seconds: float) -> Candidate | None:
    """Return the baseline or its fastest confirmed rival, whichever was confirmed less often, while the measurements don't
    decide between them. The baseline's first turn may exceed the usual share of the time."""
    fastest, baseline = view.best(), view.fitting_baseline()
    if fastest is None or baseline is None or fastest.candidate == baseline.candidate:
        return None
    turns = {one: len(view.rounds.get(one.id, ())) for one in (baseline.candidate, fastest.candidate)}
    ratio = compare(fastest, baseline, view)
    if not turns[fastest.candidate] or ratio is None or ratio.low > 1.0:
        return None
    if not turns[baseline.candidate]:
        return baseline.candidate if seconds > 2 * view.usual_seconds(load=True) else None
    if ratio.value < 1 + MIN_GAIN or min(turns.values()) >= MAX_BASELINE_ROUNDS:
        return None
    if not _affordable(view, seconds, MAX_DECISION_TIME_SHARE):
        return None
    return min(turns, key=lambda one: turns[one])


def _simpler_rival(view: TrialView) -> Candidate | None:
    """Return the simplest candidate as fast as the fastest confirmed one, if its own confirmation would make it the choice."""
    fastest = view.best()
    rivals = [] if fastest is None else [fastest, *as_fast_as(fastest, view)]
    simplest = min((trial.candidate for trial in rivals), key=lambda one: complexity(one, view.baseline), default=None)
    return None if simplest is None or simplest.id in view.confirmations or len(rivals) == 1 else simplest


def _affordable(view: TrialView, seconds: float, share: float = MAX_TIME_SHARE) -> bool:
    spent = [trial.measurement.cost.total_seconds for turns in view.rounds.values() for trial in turns]
    searching = sum(trial.measurement.cost.total_seconds for trial in view.probes)
    return seconds > 2 * view.usual_seconds(load=True) and sum(spent) + min(spent) <= share * searching


def _turns(finalists: list[Trial], number: int, view: TrialView) -> list[Trial]:
    """Return the finalists of this round, grouped by load, in reverse order every second round."""
    if number > 0:
        speeds = [speed_of(view.confirmations.get(trial.candidate.id, trial)) for trial in finalists]
        bar = (1 - _close_share(view)) * max(speeds)
        finalists = [trial for trial, speed in zip(finalists, speeds, strict=True) if speed >= bar]
        if len(finalists) == 1:
            return []
    first = finalists[0].candidate.load_key
    ordered = sorted(finalists, key=lambda trial: (trial.candidate.load_key != first, trial.candidate.load_key))
    return ordered[::-1] if number % 2 else ordered


def _close_share(view: TrialView) -> float:
    return min(MAX_CLOSE_SHARE, max(MIN_CLOSE_SHARE, view.estimates.speed.noise))
