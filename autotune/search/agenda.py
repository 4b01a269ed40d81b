"""Agenda: the next measurement, or the end of the search, as a pure function of the trials so far.

Without further state, a killed study continues at the same point. The purposes, in order:

    baseline   the user's own configuration, unless it surely can't fit: every gain is measured against it
    anchor     a candidate that is likely to fit, in the most preferred tier first, until one fits
    search     the rest of the first tier that fits, while a candidate of it may be better
    refused    the candidate nearest to fitting among those ruled out by prediction, to check the prediction
    confirm    the fastest few again, longer and in turns; the best of them is the answer
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autotune.core.answer import Proven, Purpose, Trial
from autotune.core.measurement import Outcome
from autotune.core.space import Candidate
from autotune.failures.classify import depends_on_candidate
from autotune.search.finalists import next_confirmation
from autotune.search.implications import ran_out
from autotune.search.search_options import SearchOptions
from autotune.search.surrogate.acquisition import MIN_GAIN, promising
from autotune.search.surrogate.candidate_table import IndexArray
from autotune.search.tiers import Tier
from autotune.search.trial_view import SearchProblem, TrialView, speed_of

SAFE_CHANCE = 0.95  # Chance of fitting from which a candidate is safe to begin with
# A tier is skipped for now if all its candidates are below this chance of fitting.
PLAUSIBLE_CHANCE, REMOTE_CHANCE = 0.25, 0.03  # while nothing has fitted; once a less preferred tier is known to fit
MAX_EQUAL_FAILURES = 3  # Consecutive probes with the same failure, before anything has fitted, after which the search ends
MAX_REFUSED_PROBES = 2  # Refused candidates to measure per tier; a second one only if the first fitted
MAX_LAST_RESORTS = 6  # Least demanding candidates to measure if prediction rules everything out
MIN_REFUSED_CHANCE = 1e-3  # Chance of fitting below which a refused candidate is not measured

# For Optuna's own samplers, which do not model the cost of a load:
MAX_PROBES_WITHOUT_GAIN = 12  # Probes without improvement after which the search stops, once every load of the tier was measured
# A load is abandoned if its best stays below this share of the incumbent after this many probes.
MIN_LOAD_SHARE, MIN_LOAD_PROBES = 0.6, 4


@dataclass(frozen=True, kw_only=True)
class NextProbe:
    """Measure one candidate of the pool."""

    purpose: Purpose
    pool: IndexArray  # Rows of the table


@dataclass(frozen=True, kw_only=True)
class SearchEnd:
    """No further measurement."""

    proven: Proven


@dataclass(frozen=True, kw_only=True)
class RemainingBudget:
    """Seconds and probes left."""

    seconds: float
    probes: int
    live: frozenset[str] = frozenset()  # Load keys that are ready for the next probe; if empty, that of the last one


@dataclass(frozen=True, kw_only=True)
class Wait:
    """No measurement is worth starting until a pending one is reported."""


@dataclass(frozen=True, kw_only=True)
class Agenda:
    """Decision rule for one search problem."""

    problem: SearchProblem
    options: SearchOptions
    uses_surrogate: bool  # False for Optuna's own samplers, which choose within the tier by themselves
    earlier: tuple[Trial, ...] = ()
    """Trials of other studies on the same model, versions and hardware: evidence, not counted as measured here."""

    def next(self, view: TrialView, budget: RemainingBudget) -> NextProbe | Wait | SearchEnd:
        """Return the next step. Confirmations run alone, and the search ends only when nothing is pending."""
        step: NextProbe | SearchEnd
        baseline = self.problem.baseline
        if _every_probe_fails_alike(view):
            step = SearchEnd(proven="not proven infeasible")
        else:
            opens = baseline is not None and view.is_open(baseline)
            step = self._probe("baseline", baseline) if baseline is not None and opens else self._search(view)
            if isinstance(step, NextProbe) and not self._affordable(step, view, budget):
                step = SearchEnd(proven="budget spent")
            if isinstance(step, SearchEnd) and (chosen := next_confirmation(view, budget.seconds)) is not None:
                step = self._probe("confirm", chosen)
        return Wait() if view.pending and (isinstance(step, SearchEnd) or step.purpose == "confirm") else step

    def _probe(self, purpose: Purpose, candidate: Candidate) -> NextProbe:
        return NextProbe(purpose=purpose, pool=self.problem.table.indices([candidate]))

    def _search(self, view: TrialView) -> NextProbe | SearchEnd:
        """Search the first tier that fits; before it, any preferred tier that may fit after all."""
        fitting = view.tier_of_choice()
        for tier in self.problem.tiers:
            if tier is fitting:
                return self._inside(tier, view) or self._refused(tier, view) or SearchEnd(proven="no better candidate possible")
            first = self._safest(tier, view)
            if first is not None and view.estimates.fits[first].max() >= (REMOTE_CHANCE if fitting else PLAUSIBLE_CHANCE):
                return NextProbe(purpose="anchor", pool=first)
            if first is None and (step := self._refused(tier, view)):
                return step
            if first is None and any(trial.measurement.outcome is Outcome.CRASH for trial in view.probed_in(tier)):
                return SearchEnd(proven="not proven infeasible")  # a crash is no lack of memory
        return self._last_resort(view)

    def _last_resort(self, view: TrialView) -> NextProbe | SearchEnd:
        """Measure the likeliest candidate of all: "nothing fits" is never concluded from predictions alone."""
        firsts = [first for tier in self.problem.tiers if (first := self._safest(tier, view)) is not None]
        if firsts:
            return NextProbe(purpose="anchor", pool=max(firsts, key=lambda first: float(view.estimates.fits[first].max())))
        refused = np.concatenate([view.refused_in(tier) for tier in self.problem.tiers])
        if not len(refused):
            return SearchEnd(proven="no better candidate possible")
        if sum(trial.purpose == "refused" for trial in view.probes) >= MAX_LAST_RESORTS:
            return SearchEnd(proven="not proven infeasible")
        return NextProbe(purpose="refused", pool=refused[[int(view.estimates.need.mean[refused].argmin())]])

    def _safest(self, tier: Tier, view: TrialView) -> IndexArray | None:
        """Return the open candidates with the highest chance of fitting; without predictions, the least demanding one."""
        pool = view.open_in(tier)
        if not len(pool):
            return None
        if not self.problem.surrogate.predicted[pool].any():
            return np.array([self.problem.table.least_demanding(pool)])
        chances = view.estimates.fits[pool]
        return pool[chances >= min(SAFE_CHANCE, float(chances.max()))]

    def _inside(self, tier: Tier, view: TrialView) -> NextProbe | SearchEnd | None:
        pool = view.open_in(tier)
        if not len(pool):
            return None
        if self.uses_surrogate:
            contenders = view.contenders(tier)
            if len(earlier := self._faster_in_earlier_study(pool, speed_of(contenders[0]))):
                return NextProbe(purpose="search", pool=earlier)
            pool = pool[promising(view.estimates, pool, view.leader(contenders))]
            return NextProbe(purpose="search", pool=pool) if len(pool) else None
        table = self.problem.table
        if _stopped_improving(tier, [table.candidates[row].load_key for row in pool], view):
            return SearchEnd(proven="stopped improving")
        return NextProbe(purpose="search", pool=_on_one_load(tier, pool, table.loads, table.load_number, view))

    def _faster_in_earlier_study(self, pool: IndexArray, best: float) -> IndexArray:
        """Return the fastest candidate that fitted in an earlier study, if it was faster than the best here."""
        index, open_here = self.problem.table.index, set(pool.tolist())
        fitting = [one for one in self.earlier if one.verdict.fits and index.get(one.candidate.id) in open_here]
        fastest = max(fitting, key=speed_of, default=None)
        return pool[:0] if fastest is None or speed_of(fastest) <= best else self.problem.table.indices([fastest.candidate])

    def _refused(self, tier: Tier, view: TrialView) -> NextProbe | None:
        """Return the refused candidate nearest to fitting, if it may be worth having."""
        probed = view.probed_in(tier)
        pool, checks = view.refused_in(tier), [trial for trial in probed if trial.purpose == "refused"]
        if len(checks) >= MAX_REFUSED_PROBES or any(not trial.verdict.fits for trial in checks):
            return None
        if contenders := view.contenders(tier):
            if any(ran_out(trial.measurement) for trial in probed):
                return None  # the limit was located by measurement
            pool = pool[view.estimates.speed.mean[pool] > np.log(speed_of(contenders[0]) * (1 + MIN_GAIN))]
        chances = view.estimates.fits[pool]
        if not len(pool) or chances.max() < MIN_REFUSED_CHANCE:
            return None
        return NextProbe(purpose="refused", pool=pool[[int(chances.argmax())]])

    def _affordable(self, step: NextProbe, view: TrialView, budget: RemainingBudget) -> bool:
        """True if the probe leaves time for one confirmation of the incumbent."""
        if budget.probes <= 0:
            return False
        best, table = view.best(), self.problem.table
        ready = budget.live or {trial.candidate.load_key for trial in view.probes[-1:]}
        live = [table.load_number[key] for key in ready if key in table.load_number]
        loads = not np.isin(table.loads[step.pool], live).any()
        reserve = 0.0
        if best is not None:
            reserve = 2 * view.usual_seconds(load=loads or best.candidate.load_key not in ready)
        return budget.seconds > view.usual_seconds(load=loads) + reserve


def _every_probe_fails_alike(view: TrialView) -> bool:
    """True after a failure that no candidate can avoid (a missing package), or equal ones that are not the candidates' own."""
    failures = [failure for trial in view.probes if (failure := trial.measurement.failure) is not None]
    if not any(trial.verdict.fits for trial in view.probes) and not all(map(depends_on_candidate, failures)):
        return True
    last = view.probes[-MAX_EQUAL_FAILURES:]
    broken = (Outcome.CRASH, Outcome.TIMEOUT, Outcome.INTERRUPTED)
    if len(last) < MAX_EQUAL_FAILURES or any(
        trial.verdict.fits or trial.measurement.outcome not in broken for trial in view.probes
    ):
        return False
    # Without the numbers, which differ from process to process.
    wordings = (re.sub(r"0x[0-9a-f]+|\d+", "#", failure.evidence) for trial in last if (failure := trial.measurement.failure))
    return len(set(wordings)) == 1


def _on_one_load(tier: Tier, pool: IndexArray, loads: IndexArray, numbers: Mapping[str, int], view: TrialView) -> IndexArray:
    """Return the part of the pool that needs no load, unless the live load is abandoned."""
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
