"""The search where nothing can be measured: every candidate predicted, the preferred and fastest that surely fits chosen.

The choice is made on the screen, which answers for thousands of candidates at once; what is finally named is
followed step by step once more, and if that no longer fits, the next is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from autotune.candidate import Candidate
from autotune.conclude import changes_between, relaxed_in
from autotune.forecast import Forecast, Foreseen
from autotune.prediction import Prediction
from autotune.question import Question
from autotune.study.preference import Tier, tiers_of

RUNNER_UPS = 4


class Foresees(Protocol):
    """What predicts: `autotune.foresight.Foresight`."""

    def predict(self, candidate: Candidate) -> Prediction:
        """One candidate, its very step followed."""
        ...

    def screen(self, candidates: Sequence[Candidate], *, seconds: float | None = None) -> Mapping[str, Prediction]:
        """Many candidates at once, by id; as many as so many seconds allow."""
        ...


def forecast(question: Question, foresight: Foresees, candidates: Sequence[Candidate], baseline: Candidate | None) -> Forecast:
    """The recommendation by prediction alone: of all candidates, or of those that the budget's time is enough for."""
    began = time.monotonic()
    tiers = tiers_of(question.space, candidates)
    preferred_first = [one for tier in tiers for one in tier.candidates]
    screened = foresight.screen(preferred_first, seconds=question.budget_seconds)
    seen = [[Foreseen(candidate=one, prediction=screened[one.id]) for one in _by_memory(tier, screened)] for tier in tiers]
    winner, place = _first_that_holds(foresight, seen, ends=began + question.budget_seconds)
    everyone = [one for members in seen for one in members]
    preferred = seen[: place + 1] if winner else seen
    return Forecast(
        winner=winner,
        baseline=None if baseline is None else Foreseen(candidate=baseline, prediction=foresight.predict(baseline)),
        changes=changes_between(question, baseline, winner.candidate) if winner and baseline else (),
        relaxed=relaxed_in(question, winner.candidate) if winner else {},
        runner_ups=tuple(one for one in _fastest_first(seen[place]) if one.candidate != winner.candidate)[:RUNNER_UPS]
        if winner
        else (),
        trade_offs=tuple(_one_step_further(tiers, seen, place)) if winner else (),
        undecided=_worth_a_probe(preferred, winner),
        nearest_miss=None if winner else min(everyone, key=_need),
        candidates=len(candidates),
        predicted=len(everyone),
        screened=sum(one.prediction.fits is False for one in everyone),
        elapsed_seconds=time.monotonic() - began,
    )


def speed(one: Foreseen) -> float:
    """The predicted speed; below everything where there is none."""
    rate = one.prediction.tokens_per_second
    return rate.value if rate else float("-inf")


def _need(one: Foreseen) -> tuple[float, float]:
    """What it takes at least; of those that take the same, what it most likely takes."""
    peak = one.prediction.peak_memory_bytes
    return peak.low, peak.value


def _by_memory(tier: Tier, screened: Mapping[str, Prediction]) -> list[Candidate]:
    known = [one for one in tier.candidates if one.id in screened]
    return sorted(known, key=lambda one: screened[one.id].peak_memory_bytes.value)


def _fastest_first(members: Sequence[Foreseen]) -> list[Foreseen]:
    """Those that surely fit. Where speeds are not known, or equal, the one that needs less memory is first."""
    return sorted((one for one in members if one.prediction.fits), key=speed, reverse=True)


def _first_that_holds(foresight: Foresees, seen: Sequence[Sequence[Foreseen]], *, ends: float) -> tuple[Foreseen | None, int]:
    """Followed once more, as long as there is time: the first is in any case."""
    in_order = [(place, one) for place, members in enumerate(seen) for one in _fastest_first(members)]
    for number, (place, one) in enumerate(in_order):
        if number and time.monotonic() > ends:
            return one, place
        followed = foresight.predict(one.candidate)
        if followed.fits:
            return Foreseen(candidate=one.candidate, prediction=followed), place
    return None, 0


def _one_step_further(tiers: Sequence[Tier], seen: Sequence[Sequence[Foreseen]], place: int) -> Iterator[Foreseen]:
    """The best of every tier that differs from the chosen one in a single learning knob."""
    chosen = tiers[place].learning
    for tier, members in zip(tiers, seen, strict=True):
        differing = [name for name, value in tier.learning.items() if chosen.get(name) != value]
        if len(differing) == 1 and (fitting := _fastest_first(members)):
            yield fitting[0]


def _worth_a_probe(preferred: Sequence[Sequence[Foreseen]], winner: Foreseen | None) -> Foreseen | None:
    """The first in the order of preference that may fit; beside the winner itself only what promises to be faster."""
    for number, members in enumerate(preferred):
        beside_winner = winner is not None and number == len(preferred) - 1
        others = [one for one in members if winner is None or one.candidate != winner.candidate]
        best = max((one for one in others if one.prediction.fits is None), key=speed, default=None)
        if best is not None and (not beside_winner or winner is None or speed(best) > speed(winner)):
            return best
    return None
