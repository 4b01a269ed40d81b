"""Agenda: the next measurement, or the end of the search, as a pure function of the trials so far.

Idea. The answer is the fastest candidate of the first tier in which any fits (`trial_view`: tiers
are ordered by preference, speeds are compared within one). So the search has two questions: which
tier is that, and which is its fastest candidate. For both, the surrogate has an estimate of every
candidate: its chance of fitting, and its speed with a standard deviation. Each measurement corrects
all estimates. The search ends when no candidate's expected gain is worth its probe
(`worthwhile_gains`). Without further state, a killed study continues at the same point.

A *tier* has the candidates with the same values of learning knobs. Of its candidates, those not
measured yet are *open*, or *refused* if prediction rules them out. Those that were measured, fit
and were not refuted later are its *contenders*, fastest first; the *leader* is the one with the
highest estimated speed. A *pool* is a set of rows of the table.

`next_step` decides in this order. Numbers are those of the sections below, brackets the purpose of
the probe:

    1. Every probe fails in the same way: the end.
    2. The baseline is not measured: measure it [baseline], or first another candidate if the budget
       pays for one of the two [search] (`first_probe`).
    3. Which tier fits? For each tier before the first one with a candidate that fits, most
       preferred first:
       a. Its safest candidates are likely enough to fit: measure one of them [anchor].
       b. Prediction rules out all of it: measure the likeliest [refused], to check it.
       c. Otherwise the next tier.
       No tier is likely to fit: measure the likeliest candidate of all, refused ones included, up
       to MAX_LAST_RESORTS. Predictions alone never prove that nothing fits.
    4. Inside the tier that fits:
       a. Measure any candidate that may be faster [search].
       b. Measure the likeliest of the faster ones that prediction rules out [refused], to check it.
       c. The end.
    5. Of the pool of steps 2 to 4, candidates that leave no time for a confirmation are left out
       (`affordable`); without any other: the end.
    6. At the end: confirm the finalists, one at a time [confirm] (`confirmation`). A confirmation
       and the end wait until no other probe is pending.

The agenda names a pool of candidates; the sampler chooses the one to measure (`sampler`).

On emulated GPUs speed is predicted (`predicted_order`): steps 3 and 4 measure the fastest candidate
by prediction that is likely to fit, and end with the first that does. Step 2 comes last. Optuna's
own samplers do not say when to end: for them step 4a is section 7.
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
from autotune.search.acquisition import OOM_EXPONENTS, seconds_to_measure
from autotune.search.affordable import affordable
from autotune.search.confirmation import LEAST_GAIN, TRAINING_SECONDS, next_confirmation
from autotune.search.first_probe import SAFE_CHANCE, instead_of_baseline
from autotune.search.predicted_order import fastest_by_prediction
from autotune.search.speed_comparison import MIN_GAIN
from autotune.search.surrogate.candidate_table import BoolArray, FloatArray, IndexArray
from autotune.search.surrogate.estimates import Estimates
from autotune.search.surrogate.gaussian_process import expected_improvement
from autotune.search.surrogate.implications import ran_out
from autotune.search.trial_view import Tier, TrialView, speed_of

# A tier is skipped for now if all its candidates are below this chance of fitting.
PLAUSIBLE_CHANCE = 0.25  # while nothing has fitted
REMOTE_CHANCE = 0.03  # once a less preferred tier is known to fit
# Consecutive probes with the same failure, before anything has fitted, after which the search ends
MAX_EQUAL_FAILURES = 3
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
    # Load keys (settings that a loaded model or engine can't change) of the loads that are ready
    # for the next probe; if empty, the one of the last probe is
    live: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Wait:
    """No measurement is worth starting until a pending one is reported."""


def next_step(view: TrialView, budget: RemainingBudget) -> NextProbe | Wait | SearchEnd:
    """Return the next step."""
    step = _next_probe(view, budget)
    if isinstance(step, SearchEnd):
        step = _before_the_end(view, budget) or step
    needs_all_results = isinstance(step, SearchEnd) or step.purpose == "confirm"
    if view.pending and needs_all_results:
        return Wait()
    return step


def _next_probe(view: TrialView, budget: RemainingBudget) -> NextProbe | SearchEnd:
    """Return the next probe of the search, or its end."""
    if _every_probe_fails_alike(view):
        return SearchEnd(proven="not proven infeasible")
    step = _baseline(view, budget) or _search(view)
    if isinstance(step, NextProbe):
        return _affordable_part(step, view, budget) or SearchEnd(proven="budget spent")
    return step


def _probe(
    purpose: Purpose,
    candidate: Candidate,
    view: TrialView,
) -> NextProbe:
    rows = view.table.rows_of([candidate])
    return NextProbe(purpose=purpose, pool=rows)


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


# 2. The baseline.


def _baseline(view: TrialView, budget: RemainingBudget) -> NextProbe | None:
    """Return the baseline's probe, or the one that precedes it; None once it is measured."""
    baseline = view.open_baseline
    if baseline is None or view.problem.predicted_rates:
        return None
    earlier = instead_of_baseline(view, budget.seconds)
    if earlier is not None:
        return _probe("search", earlier, view)
    return _probe("baseline", baseline, view)


# 3. Which tier fits.


def _search(view: TrialView) -> NextProbe | SearchEnd:
    fitting_tier = view.tier_of_choice()
    plausible = PLAUSIBLE_CHANCE if fitting_tier is None else REMOTE_CHANCE
    for tier in view.tiers:
        if tier is fitting_tier:
            return _inside(tier, view)
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
    fastest = fastest_by_prediction(tier, view)  # None unless speed is predicted
    if fastest is not None:
        return _probe("search", fastest, view)

    safest = _safest(tier, view)
    if safest is not None:
        highest_chance = view.estimates.fits[safest].max()
        if highest_chance < plausible:
            return None
        return NextProbe(purpose="anchor", pool=safest)

    check = _check_of_refusal(view.refused_in(tier), tier, view)
    if check is not None:
        return check
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


def _check_of_refusal(
    pool: IndexArray,
    tier: Tier,
    view: TrialView,
) -> NextProbe | None:
    """Return the refused candidate of the pool that is likeliest to fit; None after a check in this
    tier that did not fit.
    """
    checks = [trial for trial in view.probed_in(tier) if trial.purpose == "refused"]
    if not all(trial.verdict.fits for trial in checks):
        return None
    chances = view.estimates.fits[pool]
    if not len(pool) or chances.max() < MIN_REFUSED_CHANCE:
        return None
    likeliest = int(chances.argmax())
    return NextProbe(purpose="refused", pool=pool[[likeliest]])


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
        return SearchEnd(proven="nothing fits")
    refused_probes = sum(trial.purpose == "refused" for trial in view.probes)
    if refused_probes >= MAX_LAST_RESORTS:
        return SearchEnd(proven="not proven infeasible")
    needs = view.estimates.need.mean[refused]
    least_demanding = int(needs.argmin())
    return NextProbe(purpose="refused", pool=refused[[least_demanding]])


# 4. Inside the tier that fits.


def _inside(tier: Tier, view: TrialView) -> NextProbe | SearchEnd:
    """Return the next probe of the tier, or the end without any."""
    end = SearchEnd(proven="no better candidate possible")
    if view.problem.predicted_rates:
        fastest = fastest_by_prediction(tier, view)
        return end if fastest is None else _probe("search", fastest, view)
    return _maybe_faster(tier, view) or _maybe_wrongly_refused(tier, view) or end


def _maybe_faster(tier: Tier, view: TrialView) -> NextProbe | SearchEnd | None:
    pool = view.open_in(tier)
    if not len(pool):
        return None
    if not view.problem.uses_surrogate:
        return _open_until_no_gain(tier, pool, view)
    leader = view.leader(view.contenders(tier))
    pool = pool[promising(view.estimates, pool, leader, worthwhile_gains(view))]
    if not len(pool):
        return None
    return NextProbe(purpose="search", pool=pool)


def promising(
    estimates: Estimates,
    pool: IndexArray,
    leader: int,
    least: FloatArray,
) -> BoolArray:
    """Return True for members of the pool with P(fits)^c · E[max(0, lead over the leader)] >=
    the least gain that is worth it; c > 1, as an out-of-memory error costs more than its seconds.
    The lead is a difference of log speeds, so a share of speed where it is small. Its deviation
    excludes the error that both have in common.
    """
    lead, deviation = estimates.speed.lead_over(leader)
    improvement = expected_improvement(lead[pool], deviation[pool], 0.0)
    weight = estimates.fits[pool] ** OOM_EXPONENTS[0]
    return weight * improvement >= least[pool]


def worthwhile_gains(view: TrialView) -> FloatArray:
    """Return the least expected gain of every candidate that pays for its probe: the share of
    TRAINING_SECONDS that the probe takes, or LEAST_GAIN.
    """
    # No other loads are ready than the last probe's.
    share = seconds_to_measure(view, ()) / TRAINING_SECONDS
    return np.maximum(share, LEAST_GAIN)


def _maybe_wrongly_refused(tier: Tier, view: TrialView) -> NextProbe | None:
    """Return a check among the refused candidates that are estimated to be faster; None where an
    out-of-memory error located the limit.
    """
    if any(ran_out(trial.measurement) for trial in view.probed_in(tier)):
        return None
    pool = view.refused_in(tier)
    fastest = speed_of(view.contenders(tier)[0])
    if fastest > 0:  # -inf where no speed was measured
        threshold = math.log(fastest * (1 + MIN_GAIN))
        log_speeds = view.estimates.speed.mean[pool]
        pool = pool[log_speeds > threshold]
    return _check_of_refusal(pool, tier, view)


# 5. The budget.


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


# 6. The end.


def _before_the_end(view: TrialView, budget: RemainingBudget) -> NextProbe | None:
    """Return the next confirmation, then the baseline if it is still open."""
    finalist = next_confirmation(view, budget.seconds)
    if finalist is not None:
        return _probe("confirm", finalist, view)
    if view.open_baseline is None:
        return None
    comparison = _probe("baseline", view.open_baseline, view)
    return _affordable_part(comparison, view, budget)


# 7. For Optuna's own samplers.


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
