"""Search by prediction alone: the most preferred and fastest candidate that surely fits.

The choice is made among the screened predictions of thousands of candidates. The chosen one is
predicted once more from a trace of its own step; if that does not fit, the next one is taken.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from autotune.catalog import complexity
from autotune.core.answer import Forecast, PredictedCandidate
from autotune.core.job import Job
from autotune.core.space import Candidate
from autotune.prediction.service import PredictionService
from autotune.search.conclusion import MAX_RUNNER_UPS, changes_between, relaxed_in
from autotune.search.speed_comparison import EQUAL_SPEED_SHARE
from autotune.search.trial_view import Tier, tiers_of

TierPredictions = Sequence[
    Sequence[PredictedCandidate]
]  # Predicted candidates by tier, least memory first


def forecast(
    job: Job,
    service: PredictionService,
    candidates: Sequence[Candidate],
    baseline: Candidate | None,
) -> Forecast:
    """Return the answer by prediction alone, within the budget's time."""
    began = time.monotonic()
    tiers = tiers_of(job.space, candidates)
    preferred_first = [one for tier in tiers for one in tier.candidates]
    screened = service.screen(preferred_first, seconds=job.budget_seconds)
    known = (
        [
            PredictedCandidate(candidate=one, prediction=screened[one.id])
            for one in tier.candidates
            if one.id in screened
        ]
        for tier in tiers
    )
    predicted = [
        sorted(members, key=lambda one: one.prediction.peak_memory_bytes.value) for members in known
    ]
    winner, index = _first_confirmed(service, predicted, baseline, ends=began + job.budget_seconds)
    everyone = [one for members in predicted for one in members]

    def need(one: PredictedCandidate) -> tuple[float, float]:
        return one.prediction.peak_memory_bytes.low, one.prediction.peak_memory_bytes.value

    others = (
        [
            one
            for one in _fastest_first(predicted[index], baseline)
            if one.candidate != winner.candidate
        ]
        if winner
        else []
    )
    return Forecast(
        winner=winner,
        baseline=(
            None
            if baseline is None
            else PredictedCandidate(candidate=baseline, prediction=service.predict(baseline))
        ),
        changes=changes_between(job, baseline, winner.candidate) if winner and baseline else (),
        relaxed=relaxed_in(job, winner.candidate) if winner else {},
        runner_ups=tuple(others[:MAX_RUNNER_UPS]),
        trade_offs=tuple(_neighbour_tiers(tiers, predicted, index, baseline)) if winner else (),
        undecided=_worth_a_probe(predicted[: index + 1] if winner else predicted, winner),
        nearest_miss=None if winner else min(everyone, key=need),
        candidates=len(candidates),
        predicted=len(everyone),
        screened=sum(one.prediction.fits is False for one in everyone),
        elapsed_seconds=time.monotonic() - began,
    )


def speed(one: PredictedCandidate) -> float:
    """Return the predicted speed for ranking; -inf if there is none."""
    rate = one.prediction.ranking_rate
    return rate.value if rate else float("-inf")


def _fastest_first(
    members: Sequence[PredictedCandidate], baseline: Candidate | None
) -> list[PredictedCandidate]:
    """Return the candidates that surely fit, fastest first; of equally fast ones the baseline,
    then the simplest; unknown speeds in order of memory.
    """
    fitting = sorted((one for one in members if one.prediction.fits), key=speed, reverse=True)
    if not fitting or speed(fitting[0]) <= 0:
        return fitting
    bound = (1 - EQUAL_SPEED_SHARE) * speed(fitting[0])
    equal = [one for one in fitting if speed(one) >= bound]
    equal.sort(key=lambda one: (one.candidate != baseline, complexity(one.candidate, baseline)))
    return [*equal, *fitting[len(equal) :]]


def _first_confirmed(
    service: PredictionService,
    predicted: TierPredictions,
    baseline: Candidate | None,
    *,
    ends: float,
) -> tuple[PredictedCandidate | None, int]:
    """Return the first candidate that fits by its own trace as well, and its tier; after `ends`,
    the next one untraced.
    """
    in_order = [
        (index, one)
        for index, members in enumerate(predicted)
        for one in _fastest_first(members, baseline)
    ]
    for number, (index, one) in enumerate(in_order):
        if number and time.monotonic() > ends:
            return one, index
        traced = service.predict(one.candidate)
        if traced.fits:
            return PredictedCandidate(candidate=one.candidate, prediction=traced), index
    return None, 0


def _neighbour_tiers(
    tiers: Sequence[Tier], predicted: TierPredictions, index: int, baseline: Candidate | None
) -> Iterator[PredictedCandidate]:
    """Yield the best of every tier that differs from the chosen one in a single learning knob."""
    chosen = tiers[index].learning
    for tier, members in zip(tiers, predicted, strict=True):
        differing = [name for name, value in tier.learning.items() if chosen.get(name) != value]
        if len(differing) == 1 and (fitting := _fastest_first(members, baseline)):
            yield fitting[0]


def _worth_a_probe(
    preferred: TierPredictions, winner: PredictedCandidate | None
) -> PredictedCandidate | None:
    """Return the most preferred candidate that may fit; in the winner's own tier it must be
    predicted faster.
    """
    for number, members in enumerate(preferred):
        others = [one for one in members if winner is None or one.candidate != winner.candidate]
        best = max((one for one in others if one.prediction.fits is None), key=speed, default=None)
        in_winners_tier = winner is not None and number == len(preferred) - 1
        if best is not None and (
            not in_winners_tier or winner is None or speed(best) > speed(winner)
        ):
            return best
    return None
