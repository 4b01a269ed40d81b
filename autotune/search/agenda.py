"""Agenda: the next measurement, or the end of the search, as a pure function of the trials so far.

Without further state, a killed study continues at the same point. The purposes, in order:

    baseline   the user's own configuration, unless it surely can't fit: every gain is measured against it
    anchor     a candidate that is likely to fit, in the most preferred tier first, until one fits
    search     the rest of the first tier that fits, while a candidate of it may be better
    refused    the candidate nearest to fitting among those ruled out by prediction, to check the prediction
    confirm    the fastest few again, longer and in turns; the best of them is the answer
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from autotune.catalog import complexity
from autotune.core.answer import Proven, Purpose, Trial
from autotune.core.measurement import Outcome
from autotune.core.space import Candidate
from autotune.failures.classify import depends_on_candidate
from autotune.search.conclusion import as_fast_as, compare
from autotune.search.surrogate.candidate_table import BoolArray, IndexArray
from autotune.search.surrogate.estimates import Estimates
from autotune.search.surrogate.gaussian_process import expected_improvement, normal_cdf
from autotune.search.surrogate.implications import ran_out
from autotune.search.trial_view import Tier, TrialView, speed_of

MIN_GAIN = 0.02  # Smallest share of speed that counts as an improvement
MIN_CHANCE = 0.1  # Smallest chance of fitting and improving at which a candidate stays of interest
SAFE_CHANCE = 0.95  # Chance of fitting from which a candidate is safe to begin with
# A tier is skipped for now if all its candidates are below this chance of fitting.
PLAUSIBLE_CHANCE, REMOTE_CHANCE = (
    0.25,
    0.03,
)  # while nothing has fitted; once a less preferred tier is known to fit
# Consecutive probes with the same failure, before anything has fitted, after which the search ends
MAX_EQUAL_FAILURES = 3
MAX_REFUSED_PROBES = (
    2  # Refused candidates to measure per tier; a second one only if the first fitted
)
MAX_LAST_RESORTS = 6  # Least demanding candidates to measure if prediction rules everything out
MIN_REFUSED_CHANCE = 1e-3  # Chance of fitting below which a refused candidate is not measured

# For Optuna's own samplers, which do not model the cost of a load:
# Probes without improvement after which the search stops, once every load of the tier was measured
MAX_PROBES_WITHOUT_GAIN = 12
# A load is abandoned if its best stays below this share of the incumbent after this many probes.
MIN_LOAD_SHARE, MIN_LOAD_PROBES = 0.6, 4

# Finalists: candidates that are measured again, longer and in turns, before one is recommended.
MAX_FINALISTS = 3
# Expected logarithmic improvement over the leader from which a candidate is a finalist too
MIN_EXPECTED_GAIN = 0.004
ROUNDS = 2  # Turns of each finalist, so that a temporarily slow machine slows all of them
MAX_BASELINE_ROUNDS = (
    3  # Turns of the baseline and of the fastest candidate, where two do not decide between them
)
# A finalist leaves after a round if it is behind the leader by more than a probe's noise, within
# these bounds.
MIN_CLOSE_SHARE, MAX_CLOSE_SHARE = 0.01, 0.05
# Share of the search's seconds up to which a deciding turn, or that of a simpler candidate as fast
# as the fastest, is taken.
MAX_DECISION_TIME_SHARE = 1.0
MAX_TIME_SHARE = (
    0.5  # Confirmations after the first take at most this share of the seconds that the search took
)


@dataclass(frozen=True, kw_only=True)
class NextProbe:
    """Measure one candidate of the pool."""

    purpose: Purpose
    pool: IndexArray  # Rows of the table


@dataclass(frozen=True, kw_only=True)
class SearchEnd:
    proven: Proven


@dataclass(frozen=True, kw_only=True)
class RemainingBudget:
    seconds: float
    probes: int
    live: frozenset[str] = (
        frozenset()
    )  # Load keys that are ready for the next probe; if empty, that of the last one


@dataclass(frozen=True, kw_only=True)
class Wait:
    """No measurement is worth starting until a pending one is reported."""


def next_step(view: TrialView, budget: RemainingBudget) -> NextProbe | Wait | SearchEnd:
    """Return the next step. Confirmations run alone, and the search ends only when nothing is
    pending.
    """
    step: NextProbe | SearchEnd
    baseline = view.baseline
    if _every_probe_fails_alike(view):
        step = SearchEnd(proven="not proven infeasible")
    else:
        opens = baseline is not None and view.is_open(baseline)
        step = (
            _probe("baseline", baseline, view) if baseline is not None and opens else _search(view)
        )
        if isinstance(step, NextProbe) and not _leaves_confirmation(step, view, budget):
            step = SearchEnd(proven="budget spent")
        if (
            isinstance(step, SearchEnd)
            and (chosen := next_confirmation(view, budget.seconds)) is not None
        ):
            step = _probe("confirm", chosen, view)
    return (
        Wait()
        if view.pending and (isinstance(step, SearchEnd) or step.purpose == "confirm")
        else step
    )


def _probe(purpose: Purpose, candidate: Candidate, view: TrialView) -> NextProbe:
    return NextProbe(purpose=purpose, pool=view.table.rows_of([candidate]))


def _search(view: TrialView) -> NextProbe | SearchEnd:
    """Search the first tier that fits; before it, any preferred tier that may fit after all."""
    fitting = view.tier_of_choice()
    for tier in view.tiers:
        if tier is fitting:
            return (
                _inside(tier, view)
                or _refused(tier, view)
                or SearchEnd(proven="no better candidate possible")
            )
        first = _safest(tier, view)
        if first is not None and view.estimates.fits[first].max() >= (
            REMOTE_CHANCE if fitting else PLAUSIBLE_CHANCE
        ):
            return NextProbe(purpose="anchor", pool=first)
        if first is None and (step := _refused(tier, view)):
            return step
        if first is None and any(
            trial.measurement.outcome is Outcome.CRASH for trial in view.probed_in(tier)
        ):
            return SearchEnd(proven="not proven infeasible")  # a crash is no lack of memory
    return _last_resort(view)


def _last_resort(view: TrialView) -> NextProbe | SearchEnd:
    """Measure the likeliest candidate of all: "nothing fits" is never concluded from predictions
    alone.
    """
    firsts = [first for tier in view.tiers if (first := _safest(tier, view)) is not None]
    if firsts:
        return NextProbe(
            purpose="anchor",
            pool=max(firsts, key=lambda first: float(view.estimates.fits[first].max())),
        )
    refused = np.concatenate([view.refused_in(tier) for tier in view.tiers])
    if not len(refused):
        return SearchEnd(proven="no better candidate possible")
    if sum(trial.purpose == "refused" for trial in view.probes) >= MAX_LAST_RESORTS:
        return SearchEnd(proven="not proven infeasible")
    return NextProbe(
        purpose="refused", pool=refused[[int(view.estimates.need.mean[refused].argmin())]]
    )


def _safest(tier: Tier, view: TrialView) -> IndexArray | None:
    """Return the open candidates with the highest chance of fitting; without predictions, the
    least demanding one.
    """
    pool = view.open_in(tier)
    if not len(pool):
        return None
    if not view.problem.surrogate.predicted[pool].any():
        return np.array([view.table.least_demanding(pool)])
    chances = view.estimates.fits[pool]
    return pool[chances >= min(SAFE_CHANCE, float(chances.max()))]


def _inside(tier: Tier, view: TrialView) -> NextProbe | SearchEnd | None:
    pool = view.open_in(tier)
    if not len(pool):
        return None
    if view.problem.uses_surrogate:
        contenders = view.contenders(tier)
        if len(earlier := _faster_in_earlier_study(pool, speed_of(contenders[0]), view)):
            return NextProbe(purpose="search", pool=earlier)
        pool = pool[promising(view.estimates, pool, view.leader(contenders))]
        return NextProbe(purpose="search", pool=pool) if len(pool) else None
    if _stopped_improving(tier, [view.table.candidates[row].load_key for row in pool], view):
        return SearchEnd(proven="stopped improving")
    return NextProbe(purpose="search", pool=_on_one_load(tier, pool, view))


def promising(estimates: Estimates, pool: IndexArray, leader: int) -> BoolArray:
    """True for members of the pool with P(fits) · P(lead over the leader > MIN_GAIN) >=
    MIN_CHANCE. The lead's deviation excludes the error that both have in common.
    """
    lead, deviation = estimates.speed.lead_over(leader)
    chance = estimates.fits[pool] * normal_cdf(
        (lead[pool] - math.log1p(MIN_GAIN)) / deviation[pool]
    )
    return np.asarray(chance >= MIN_CHANCE)


def _faster_in_earlier_study(pool: IndexArray, best: float, view: TrialView) -> IndexArray:
    """Return the fastest candidate that fitted in an earlier study, if it was faster than the
    best here.
    """
    index, open_here = view.table.row_by_id, set(pool.tolist())
    fitting = [
        one
        for one in view.problem.earlier
        if one.verdict.fits and index.get(one.candidate.id) in open_here
    ]
    fastest = max(fitting, key=speed_of, default=None)
    return (
        pool[:0]
        if fastest is None or speed_of(fastest) <= best
        else view.table.rows_of([fastest.candidate])
    )


def _refused(tier: Tier, view: TrialView) -> NextProbe | None:
    """Return the refused candidate nearest to fitting, if it may be worth having."""
    probed = view.probed_in(tier)
    pool, checks = view.refused_in(tier), [trial for trial in probed if trial.purpose == "refused"]
    if len(checks) >= MAX_REFUSED_PROBES or any(not trial.verdict.fits for trial in checks):
        return None
    if contenders := view.contenders(tier):
        if any(ran_out(trial.measurement) for trial in probed):
            return None  # the limit was located by measurement
        pool = pool[
            view.estimates.speed.mean[pool] > np.log(speed_of(contenders[0]) * (1 + MIN_GAIN))
        ]
    chances = view.estimates.fits[pool]
    if not len(pool) or chances.max() < MIN_REFUSED_CHANCE:
        return None
    return NextProbe(purpose="refused", pool=pool[[int(chances.argmax())]])


def _leaves_confirmation(step: NextProbe, view: TrialView, budget: RemainingBudget) -> bool:
    """True if the probe leaves time for one confirmation of the incumbent."""
    if budget.probes <= 0:
        return False
    best, table = view.best(), view.table
    ready = budget.live or {trial.candidate.load_key for trial in view.probes[-1:]}
    live = [table.load_number[key] for key in ready if key in table.load_number]
    loads = not np.isin(table.loads[step.pool], live).any()
    reserve = 0.0
    if best is not None:
        reserve = 2 * view.usual_seconds(load=loads or best.candidate.load_key not in ready)
    return budget.seconds > view.usual_seconds(load=loads) + reserve


def _every_probe_fails_alike(view: TrialView) -> bool:
    """True after a failure that no candidate can avoid (a missing package), or equal ones that
    are not the candidates' own.
    """
    failures = [
        failure for trial in view.probes if (failure := trial.measurement.failure) is not None
    ]
    if not any(trial.verdict.fits for trial in view.probes) and not all(
        map(depends_on_candidate, failures)
    ):
        return True
    last = view.probes[-MAX_EQUAL_FAILURES:]
    broken = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.INTERRUPTED)
    if len(last) < MAX_EQUAL_FAILURES or any(
        trial.verdict.fits or trial.measurement.outcome not in broken for trial in view.probes
    ):
        return False
    # Without the numbers, which differ from process to process.
    wordings = (
        re.sub(r"0x[0-9a-f]+|\d+", "#", failure.evidence)
        for trial in last
        if (failure := trial.measurement.failure)
    )
    return len(set(wordings)) == 1


def _on_one_load(tier: Tier, pool: IndexArray, view: TrialView) -> IndexArray:
    """Return the part of the pool that needs no load, unless the live load is abandoned."""
    loads, numbers = view.table.loads, view.table.load_number
    best = max((speed_of(trial) for trial in view.contenders(tier)), default=0.0)
    by_load: dict[str, list[float]] = {}
    for trial in view.probed_in(tier):
        by_load.setdefault(trial.candidate.load_key, []).append(speed_of(trial))
    abandoned = {
        numbers[key]
        for key, speeds in by_load.items()
        if key in numbers and len(speeds) >= MIN_LOAD_PROBES and max(speeds) < MIN_LOAD_SHARE * best
    }
    live = numbers.get(view.probes[-1].candidate.load_key) if view.probes else None
    if live is not None and live not in abandoned and (loads[pool] == live).any():
        return np.asarray(pool[loads[pool] == live])
    others = pool[~np.isin(loads[pool], list(abandoned))]
    return others if len(others) else pool


def _stopped_improving(tier: Tier, open_loads: list[str], view: TrialView) -> bool:
    """True if every load was measured and the last probes brought no improvement."""
    probed = view.probed_in(tier)
    if not {trial.candidate.load_key for trial in probed}.issuperset(open_loads):
        return False
    best, without_gain = 0.0, 0
    for trial in probed:
        speed = speed_of(trial) if trial.verdict.fits else 0.0
        without_gain = 0 if speed > best * (1 + MIN_GAIN) else without_gain + 1
        best = max(best, speed)
    return without_gain >= MAX_PROBES_WITHOUT_GAIN


def next_confirmation(view: TrialView, seconds: float) -> Candidate | None:
    """Return the next finalist to measure: always the leader once, the others and further rounds
    while time allows.
    """
    tier = view.tier_of_choice()
    if tier is None:
        return None
    finalists = _finalists(view, tier)
    if (rival := _unclear_rival(view, seconds)) is not None:
        return rival
    if (simpler := _simpler_rival(view)) is not None and _affordable(
        view, seconds, MAX_DECISION_TIME_SHARE
    ):
        return simpler
    if any(trial.candidate.id in view.rounds for trial in finalists) and not _affordable(
        view, seconds
    ):
        return None
    for number in range(ROUNDS):
        for trial in _turns(finalists, number, view):
            if len(view.rounds.get(trial.candidate.id, ())) <= number:
                return trial.candidate
    return None


def _finalists(view: TrialView, tier: Tier) -> list[Trial]:
    """Return the contenders by estimated speed, which one lucky probe moves less than a ranking
    by measured speed.
    """
    contenders = view.contenders(tier)
    rows = view.table.rows_of(trial.candidate for trial in contenders)
    lead, deviation = (
        each[rows] for each in view.estimates.speed.lead_over(view.leader(contenders))
    )
    gains = expected_improvement(lead, deviation, 0.0)
    gains[int(lead.argmax())] = np.inf
    order = [int(row) for row in np.argsort(-gains, kind="stable")[:MAX_FINALISTS]]
    chosen = [contenders[row] for row in order if gains[row] > MIN_EXPECTED_GAIN]
    # Add contenders whose probe was faster than every confirmation: either of the two may have been
    # luck.
    confirmed = [
        speed_of(view.confirmations[one.candidate.id])
        for one in contenders
        if one.candidate.id in view.confirmations
    ]
    bar = (1 + _close_share(view)) * max(confirmed, default=float("inf"))
    among = {trial.candidate.id for trial in chosen}
    faster = [trial for trial in contenders[:MAX_FINALISTS] if speed_of(trial) > bar]
    return [*chosen, *(trial for trial in faster if trial.candidate.id not in among)]


def _unclear_rival(view: TrialView, seconds: float) -> Candidate | None:
    """Return the baseline or its fastest confirmed rival, whichever was confirmed less often,
    while the measurements don't decide between them. The baseline's first turn may exceed the
    usual share of the time.
    """
    fastest, baseline = view.best(), view.fitting_baseline()
    if fastest is None or baseline is None or fastest.candidate == baseline.candidate:
        return None
    turns = {
        one: len(view.rounds.get(one.id, ())) for one in (baseline.candidate, fastest.candidate)
    }
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
    """Return the simplest candidate as fast as the fastest confirmed one, if its own
    confirmation would make it the choice.
    """
    fastest = view.best()
    rivals = [] if fastest is None else [fastest, *as_fast_as(fastest, view)]
    simplest = min(
        (trial.candidate for trial in rivals),
        key=lambda one: complexity(one, view.baseline),
        default=None,
    )
    return (
        None
        if simplest is None or simplest.id in view.confirmations or len(rivals) == 1
        else simplest
    )


def _affordable(view: TrialView, seconds: float, share: float = MAX_TIME_SHARE) -> bool:
    spent = [
        trial.measurement.cost.total_seconds for turns in view.rounds.values() for trial in turns
    ]
    searching = sum(trial.measurement.cost.total_seconds for trial in view.probes)
    return (
        seconds > 2 * view.usual_seconds(load=True) and sum(spent) + min(spent) <= share * searching
    )


def _turns(finalists: list[Trial], number: int, view: TrialView) -> list[Trial]:
    """Return the finalists of this round, grouped by load, in reverse order every second round."""
    if number > 0:
        speeds = [
            speed_of(view.confirmations.get(trial.candidate.id, trial)) for trial in finalists
        ]
        bar = (1 - _close_share(view)) * max(speeds)
        finalists = [trial for trial, speed in zip(finalists, speeds, strict=True) if speed >= bar]
        if len(finalists) == 1:
            return []
    first = finalists[0].candidate.load_key
    ordered = sorted(
        finalists, key=lambda trial: (trial.candidate.load_key != first, trial.candidate.load_key)
    )
    return ordered[::-1] if number % 2 else ordered


def _close_share(view: TrialView) -> float:
    return min(MAX_CLOSE_SHARE, max(MIN_CLOSE_SHARE, view.estimates.speed.noise))
