"""The finalists: which candidates are measured again, longer and in turns, before one is recommended."""

from __future__ import annotations

from autotune.candidate import Candidate
from autotune.recommendation import Trial
from autotune.study.view import View, speed_of

FINALISTS = 3
"""At most this many candidates are measured again before one is recommended."""

CLOSE, NEAR, FAR = 3.0, 0.03, 0.12
"""A candidate that is slower than the fastest by so many times the noise of one probe, but at least and at most by these
shares, may still be the fastest."""

ROUNDS = 2
"""Finalists take so many turns, so that a machine that is slow for a while is slow for all of them."""

BEHIND = 0.5
"""A finalist that is behind the leader by this part of that after a round is out of the next."""


def confirmation(seen: View, seconds: float) -> Candidate | None:
    """The next finalist to measure again: the fastest always, the others and further rounds while time is left."""
    tier = seen.tier_of_choice()
    if tier is None:
        return None
    contenders = seen.contenders(tier)
    finalists = [trial for trial in contenders if speed_of(trial) >= (1 - _close(seen)) * speed_of(contenders[0])][:FINALISTS]
    anything_confirmed = any(trial.candidate.id in seen.rounds for trial in finalists)
    if seconds <= (2 * seen.usual_seconds(load=True) if anything_confirmed else 0.0):
        return None
    for number in range(ROUNDS):
        for trial in _turns(finalists, number, seen):
            if len(seen.rounds.get(trial.candidate.id, ())) <= number:
                return trial.candidate
    return None


def _turns(finalists: list[Trial], number: int, seen: View) -> list[Trial]:
    """Who is measured in this round, in which order: one load after the other, every second round backwards."""
    if number > 0:
        best = max(_confirmed_speed(trial, seen) for trial in finalists)
        finalists = [trial for trial in finalists if _confirmed_speed(trial, seen) >= (1 - BEHIND * _close(seen)) * best]
        if len(finalists) == 1:
            return []
    first = finalists[0].candidate.load_key
    ordered = sorted(finalists, key=lambda trial: (trial.candidate.load_key != first, trial.candidate.load_key))
    return ordered[::-1] if number % 2 else ordered


def _close(seen: View) -> float:
    return min(FAR, max(NEAR, CLOSE * seen.beliefs.speed.noise))


def _confirmed_speed(trial: Trial, seen: View) -> float:
    return speed_of(seen.confirmations.get(trial.candidate.id, trial))
