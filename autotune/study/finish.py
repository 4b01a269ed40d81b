"""The finalists: which candidates are measured again, longer and in turns, before one is recommended."""

from __future__ import annotations

import numpy as np

from autotune.candidate import Candidate
from autotune.recommendation import Trial
from autotune.study.gauss import expected_gain
from autotune.study.preference import Tier
from autotune.study.view import View, speed_of

FINALISTS = 3
"""At most this many candidates are measured again before one is recommended."""

WORTH = 0.004
"""What may be faster than the fastest by this share, on average over what is not known of the two, is a finalist too."""

ROUNDS = 2
"""Finalists take so many turns, so that a machine that is slow for a while is slow for all of them."""

CLOSE, LEAST, MOST = 1.0, 0.01, 0.05
"""Who is behind the leader after a round by so many times a probe's noise, at least and at most by these shares, is out."""

SHARE = 0.5
"""Telling finalists apart takes at most this share of the seconds that the search took; the first confirmation is always made."""


def confirmation(seen: View, seconds: float) -> Candidate | None:
    """The next finalist to measure again: the fastest always, the others and further rounds while it is worth the time."""
    tier = seen.tier_of_choice()
    if tier is None:
        return None
    finalists = _finalists(seen, tier)
    if any(trial.candidate.id in seen.rounds for trial in finalists) and not _affordable(seen, seconds):
        return None
    for number in range(ROUNDS):
        for trial in _turns(finalists, number, seen):
            if len(seen.rounds.get(trial.candidate.id, ())) <= number:
                return trial.candidate
    return None


def _finalists(seen: View, tier: Tier) -> list[Trial]:
    """By what is believed of them, which a single lucky probe moves less than a ranking by what it showed."""
    contenders = seen.contenders(tier)
    ahead, doubt = seen.ahead(contenders, seen.leader(contenders))
    gains = expected_gain(ahead, doubt, 0.0)
    gains[int(ahead.argmax())] = np.inf
    order = [int(place) for place in np.argsort(-gains, kind="stable")[:FINALISTS]]
    chosen = [contenders[place] for place in order if gains[place] > WORTH]
    among = {trial.candidate.id for trial in chosen}
    return [*chosen, *(trial for trial in _unanswered(contenders, seen) if trial.candidate.id not in among)]


def _unanswered(contenders: list[Trial], seen: View) -> list[Trial]:
    """Who showed more in its probe than any finalist did when measured again: the luck may have been the probe's or theirs."""
    confirmed = [speed_of(seen.confirmations[one.candidate.id]) for one in contenders if one.candidate.id in seen.confirmations]
    bar = (1 + _close(seen)) * max(confirmed, default=float("inf"))
    return [trial for trial in contenders[:FINALISTS] if speed_of(trial) > bar]


def _affordable(seen: View, seconds: float) -> bool:
    spent = [trial.measurement.cost.total_seconds for turns in seen.rounds.values() for trial in turns]
    searching = sum(trial.measurement.cost.total_seconds for trial in seen.probes)
    return seconds > 2 * seen.usual_seconds(load=True) and sum(spent) + min(spent) <= SHARE * searching


def _turns(finalists: list[Trial], number: int, seen: View) -> list[Trial]:
    """Who is measured in this round, in which order: one load after the other, every second round backwards."""
    if number > 0:
        best = max(_confirmed_speed(trial, seen) for trial in finalists)
        finalists = [trial for trial in finalists if _confirmed_speed(trial, seen) >= (1 - _close(seen)) * best]
        if len(finalists) == 1:
            return []
    first = finalists[0].candidate.load_key
    ordered = sorted(finalists, key=lambda trial: (trial.candidate.load_key != first, trial.candidate.load_key))
    return ordered[::-1] if number % 2 else ordered


def _close(seen: View) -> float:
    return min(MOST, max(LEAST, CLOSE * seen.beliefs.speed.noise))


def _confirmed_speed(trial: Trial, seen: View) -> float:
    return speed_of(seen.confirmations.get(trial.candidate.id, trial))
