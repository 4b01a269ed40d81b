"""Agenda: the next measurement, or the end of the search, as a pure function of the trials so far.

Idea. The answer is the fastest candidate of the first tier in which any fits (`trial_view`: tiers
are ordered by preference, speeds are compared within one). So the search has two questions: which
tier is that, and which is its fastest candidate. For both, the surrogate has an estimate of every
candidate: its chance of fitting, and its speed with a standard deviation. Each measurement corrects
all estimates. The search ends when no candidate is expected to add MIN_EXPECTED_GAIN to the speed.
Without further state, a killed study continues at the same point.

`next_step` decides in this order; the purpose of a probe is in brackets:

    1. Every probe fails in the same way: the end.
    2. The user's own configuration is not measured: measure it [baseline]. Every gain is measured
       against it.
    3. For each tier, most preferred first:
       a. It is the first one with a candidate that fits:
            measure any candidate that may be faster [search];
            then measure the likeliest of those that prediction ruled out, to check it [refused];
            then the end.
       b. Its safest candidates are likely enough to fit: measure one of them [anchor].
       c. Prediction rules out all of it: measure the likeliest [refused], up to
          MAX_REFUSED_PROBES.
       d. Otherwise the next tier.
    4. No tier is likely to fit: measure the likeliest candidate of all, up to MAX_LAST_RESORTS.
       Predictions alone never prove that nothing fits.
    5. Of the pool of steps 2 to 4, candidates that leave no time for a confirmation are left out
       (`affordable`); without any other: the end.
    6. At the end: confirm the finalists, one at a time [confirm] (`confirmation`).
    7. Steps 6 and the end wait until no other probe is pending.

On emulated GPUs speed is predicted (`predicted_order`). Step 3a measures the fastest candidate by
prediction that is likely to fit, and ends with the first that does. Step 2 comes last.

The agenda names a pool of candidates; the sampler chooses the one to measure (`sampler`). Optuna's
own samplers do not say when to end. For them step 3a is replaced: all open candidates of the tier,
until MAX_PROBES_WITHOUT_GAIN.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np

from autotune.core.answer import Proven, Purpose
from autotune.core.measurement import Outcome
from autotune.core.space import Candidate
from autotune.failures.classify import depends_on_candidate
from autotune.search.acquisition import OOM_EXPONENTS
from autotune.search.affordable import affordable
from autotune.search.confirmation import MIN_EXPECTED_GAIN, next_confirmation
from autotune.search.predicted_order import fastest_by_prediction
from autotune.search.speed_comparison import MIN_GAIN
from autotune.search.surrogate.candidate_table import BoolArray, IndexArray
from autotune.search.surrogate.estimates import Estimates
from autotune.search.surrogate.gaussian_process import expected_improvement
from autotune.search.surrogate.implications import ran_out
from autotune.search.trial_view import Tier, TrialView, speed_of

SAFE_CHANCE = 0.95  # Chance of fitting from which a candidate is safe to begin with
# A tier is skipped for now if all its candidates are below this chance of fitting.
PLAUSIBLE_CHANCE = 0.25  # while nothing has fitted
REMOTE_CHANCE = 0.03  # once a less preferred tier is known to fit
# Consecutive probes with the same failure, before anything has fitted, after which the search ends
MAX_EQUAL_FAILURES = 3
# Refused candidates to measure per tier; a second one only if the first fitted
MAX_REFUSED_PROBES = 2
MAX_LAST_RESORTS = 6  # Least demanding candidates to measure if prediction rules everything out
MIN_REFUSED_CHANCE = 1e-3  # Chance of fitting below which a refused candidate is not measured

# Optuna's own samplers: probes without improvement after which the search ends
MAX_PROBES_WITHOUT_GAIN = 12

MACHINE_OUTCOMES = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.INTERRUPTED)
"""Failures that need not be the candidate's own."""


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
    # Load keys that are ready for the next probe; if empty, that of the last one
    live: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Wait:
    """No measurement is worth starting until a pending one is reported."""


def next_step(view: TrialView, budget: RemainingBudget) -> NextProbe | Wait | SearchEnd:
    """Return the next step. Confirmations run alone, and the search ends only when nothing is
    pending.
    """
    step = _search_within(budget, view)
    if isinstance(step, SearchEnd):
        finalist = next_confirmation(view, budget.seconds)
        if finalist is not None:
            step = _probe("confirm", finalist, view)
        elif view.open_baseline is not None:
            comparison = _probe("baseline", view.open_baseline, view)
            step = _affordable_part(comparison, view, budget) or step

    needs_all_results = isinstance(step, SearchEnd) or step.purpose == "confirm"
    if view.pending and needs_all_results:
        return Wait()
    return step


def _probe(
    purpose: Purpose,
    candidate: Candidate,
    view: TrialView,
) -> NextProbe:
    rows = view.table.rows_of([candidate])
    return NextProbe(purpose=purpose, pool=rows)


def _search_within(budget: RemainingBudget, view: TrialView) -> NextProbe | SearchEnd:
    """Return the next probe of the search, or its end."""
    if _every_probe_fails_alike(view):
        return SearchEnd(proven="not proven infeasible")
    baseline = view.open_baseline
    if baseline is not None and not view.problem.predicted_rates:
        step: NextProbe | SearchEnd = _probe("baseline", baseline, view)
    else:
        step = _search(view)
    if isinstance(step, NextProbe):
        return _affordable_part(step, view, budget) or SearchEnd(proven="budget spent")
    return step


# 1. Every probe fails in the same way.


def _every_probe_fails_alike(view: TrialView) -> bool:
    """Return True after a failure that no candidate can avoid (a missing package), or equal ones
    that are not the candidates' own.
    """
    if any(trial.verdict.fits for trial in view.probes):
        return False
    for trial in view.probes:
        failure = trial.measurement.failure
        if failure is not None and not depends_on_candidate(failure):
            return True
    if len(view.probes) < MAX_EQUAL_FAILURES:
        return False
    if any(trial.measurement.outcome not in MACHINE_OUTCOMES for trial in view.probes):
        return False
    wordings = set()
    for trial in view.probes[-MAX_EQUAL_FAILURES:]:
        failure = trial.measurement.failure
        if failure is not None:
            # Without the numbers, which differ from process to process.
            wordings.add(re.sub(r"0x[0-9a-f]+|\d+", "#", failure.evidence))
    return len(wordings) == 1


# 2. The first tier that fits; before it, any preferred tier that may fit after all.


def _search(view: TrialView) -> NextProbe | SearchEnd:
    fitting_tier = view.tier_of_choice()
    plausible = PLAUSIBLE_CHANCE if fitting_tier is None else REMOTE_CHANCE
    for tier in view.tiers:
        fastest = fastest_by_prediction(tier, view)
        if fastest is not None:
            return _probe("search", fastest, view)
        if tier is fitting_tier:
            end = SearchEnd(proven="no better candidate possible")
            if view.problem.predicted_rates:
                return end
            return _inside(tier, view) or _refused(tier, view) or end
        step = _whether_fits(tier, view, plausible)
        if step is not None:
            return step
    return _last_resort(view)


def _whether_fits(
    tier: Tier,
    view: TrialView,
    plausible: float,
) -> NextProbe | SearchEnd | None:
    """Return a probe that may show that the tier fits; None if that is not likely enough."""
    safest = _safest(tier, view)
    if safest is not None:
        highest_chance = view.estimates.fits[safest].max()
        if highest_chance < plausible:
            return None
        return NextProbe(purpose="anchor", pool=safest)

    refused = _refused(tier, view)
    if refused is not None:
        return refused
    for trial in view.probed_in(tier):
        if trial.measurement.outcome is Outcome.CRASH:
            return SearchEnd(proven="not proven infeasible")  # A crash is no lack of memory
    return None


def _safest(tier: Tier, view: TrialView) -> IndexArray | None:
    """Return the open candidates with the highest chance of fitting; without predictions, the
    least demanding one.
    """
    pool = view.open_in(tier)
    if not len(pool):
        return None
    any_predicted = view.problem.surrogate.predicted[pool].any()
    if not any_predicted:
        least_demanding = view.table.least_demanding(pool)
        return np.array([least_demanding])
    chances = view.estimates.fits[pool]
    threshold = min(SAFE_CHANCE, float(chances.max()))
    return pool[chances >= threshold]


def _refused(tier: Tier, view: TrialView) -> NextProbe | None:
    """Return the refused candidate nearest to fitting, if it may be worth having."""
    # 1. Stop after a check that did not fit, and where the limit was located by measurement.
    probed = view.probed_in(tier)
    contenders = view.contenders(tier)
    checks = [trial for trial in probed if trial.purpose == "refused"]
    all_fitted = all(trial.verdict.fits for trial in checks)
    if not all_fitted or len(checks) >= MAX_REFUSED_PROBES:
        return None
    any_ran_out = any(ran_out(trial.measurement) for trial in probed)
    if contenders and any_ran_out:
        return None

    # 2. Of those that are estimated to be faster, choose the likeliest to fit.
    pool = view.refused_in(tier)
    best = max(map(speed_of, contenders), default=0.0)
    if best > 0:
        threshold = np.log(best * (1 + MIN_GAIN))
        log_speeds = view.estimates.speed.mean[pool]
        pool = pool[log_speeds > threshold]
    chances = view.estimates.fits[pool]
    if not len(pool) or chances.max() < MIN_REFUSED_CHANCE:
        return None
    likeliest = int(chances.argmax())
    likeliest_pool = pool[[likeliest]]
    return NextProbe(purpose="refused", pool=likeliest_pool)


def _last_resort(view: TrialView) -> NextProbe | SearchEnd:
    """Measure the likeliest candidate of all: "nothing fits" is never concluded from predictions
    alone.
    """
    likeliest: IndexArray | None = None
    highest_chance = -math.inf
    for tier in view.tiers:
        safest = _safest(tier, view)
        if safest is None:
            continue
        chances = view.estimates.fits[safest]
        chance = chances.max()
        if chance > highest_chance:
            likeliest = safest
            highest_chance = chance
    if likeliest is not None:
        return NextProbe(purpose="anchor", pool=likeliest)

    refused = np.concatenate([view.refused_in(tier) for tier in view.tiers])
    if not len(refused):
        return SearchEnd(proven="no better candidate possible")
    refused_probes = sum(trial.purpose == "refused" for trial in view.probes)
    if refused_probes >= MAX_LAST_RESORTS:
        return SearchEnd(proven="not proven infeasible")
    needs = view.estimates.need.mean[refused]
    least_demanding = int(needs.argmin())
    return NextProbe(purpose="refused", pool=refused[[least_demanding]])


# 3. Inside the tier that fits.


def _inside(tier: Tier, view: TrialView) -> NextProbe | SearchEnd | None:
    """Return the next probe among the candidates that may be faster; None without any."""
    pool = view.open_in(tier)
    if not len(pool):
        return None
    if not view.problem.uses_surrogate:
        return _open_until_no_gain(tier, pool, view)
    contenders = view.contenders(tier)
    leader = view.leader(contenders)
    pool = pool[promising(view.estimates, pool, leader)]
    if not len(pool):
        return None
    return NextProbe(purpose="search", pool=pool)


def promising(
    estimates: Estimates,
    pool: IndexArray,
    leader: int,
) -> BoolArray:
    """Return True for members of the pool with P(fits)^c · E[max(0, lead over the leader)] >=
    MIN_EXPECTED_GAIN. The lead's deviation excludes the error that both have in common.
    """
    lead, deviation = estimates.speed.lead_over(leader)
    improvement = expected_improvement(lead[pool], deviation[pool], 0.0)
    weight = estimates.fits[pool] ** OOM_EXPONENTS[0]
    return weight * improvement >= MIN_EXPECTED_GAIN


# 4. The budget.


def _affordable_part(
    step: NextProbe,
    view: TrialView,
    budget: RemainingBudget,
) -> NextProbe | None:
    """Return the step without the candidates that the budget does not pay for; None without any
    left.
    """
    if budget.probes <= 0:
        return None
    pool = affordable(step.pool, view, budget.seconds, budget.live)
    return replace(step, pool=pool) if len(pool) else None


# 5. For Optuna's own samplers.


def _open_until_no_gain(
    tier: Tier,
    pool: IndexArray,
    view: TrialView,
) -> NextProbe | SearchEnd:
    """Return the whole pool, until the last probes brought no improvement."""
    best = 0.0
    without_gain = 0
    for trial in view.probed_in(tier):
        speed = speed_of(trial) if trial.verdict.fits else 0.0
        without_gain += 1
        if speed > best * (1 + MIN_GAIN):
            without_gain = 0
        best = max(best, speed)
    if without_gain >= MAX_PROBES_WITHOUT_GAIN:
        return SearchEnd(proven="stopped improving")
    return NextProbe(purpose="search", pool=pool)
