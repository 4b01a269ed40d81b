"""What to measure next, and when to stop: a pure function of what has been measured so far.

Because nothing else is remembered, a study that was killed goes on where it stood.

    anchor     something that surely fits, in the most preferred tier, then in each next one, until one does
    baseline   the user's own configuration, so that there is something to compare with
    search     the rest of the first tier that fits, while anything of it may still be better
    refused    the nearest of what prediction ruled out: a prediction is not taken at its word where one probe can tell
    confirm    the fastest few again, longer and in turns; the best of these is the answer
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.candidate import Candidate
from autotune.measurement import Outcome
from autotune.recommendation import Proven, Purpose, Trial
from autotune.study.facts import ran_out
from autotune.study.finish import confirmation
from autotune.study.loads import on_one_load, stopped_improving
from autotune.study.options import SearchOptions
from autotune.study.preference import Tier
from autotune.study.table import Places
from autotune.study.view import Ground, View, speed_of
from autotune.study.worth import promising

SURELY = 0.95
"""What fits with at least this chance is safe to begin with."""

PLAUSIBLE, REMOTE = 0.25, 0.03
"""A tier is passed over, for the time being, where nothing of it fits with at least this chance: the first while nothing has
fitted anywhere, the second once a less preferred tier is known to fit."""

ALIKE = 3
"""So many probes in a row that end in the very same failure, before anything has fitted, say that every probe will."""

REFUSED_PROBES = 2
"""At most so many probes go to what prediction ruled out in a tier, and one only where that one did not fit."""

LAST_RESORTS = 6
"""Where everything is ruled out by prediction, at most so many of the least demanding are measured before it is believed."""

HOPELESS_ODDS = 1e-3
"""Less likely to fit than this is not worth such a probe."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Measure one of these candidates, for this purpose."""

    purpose: Purpose
    pool: Places
    """Their places in the table."""


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Nothing more to measure."""

    proven: Proven


@dataclass(frozen=True, kw_only=True)
class Means:
    """What is left to spend."""

    seconds: float
    probes: int
    live: frozenset[str] = frozenset()
    """Load keys that stand ready for the next probe; none: that of the last one."""


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Nothing more is worth starting before one of those that are being measured has been told."""


@dataclass(frozen=True, kw_only=True)
class Agenda:
    """The fixed part of the question: what could be measured."""

    ground: Ground
    options: SearchOptions
    weighs: bool
    """Whether what is believed of the candidates chooses among them; a stock sampler chooses by its own lights."""

    earlier: tuple[Trial, ...] = ()
    """Of other studies on the same model, versions and hardware: believed, and not counted as measured here."""

    def view(self, trials: tuple[Trial, ...], pending: frozenset[str] = frozenset()) -> View:
        return View(self.ground, trials, self.earlier, pending)

    def next(self, seen: View, means: Means) -> Step | Wait | Stop:
        """The next step, given everything measured and what is left to spend. Finalists are measured one by one, alone, and
        that it is done is said when all is told."""
        step = self._next(seen, means)
        return Wait() if seen.pending and (isinstance(step, Stop) or step.purpose == "confirm") else step

    def _next(self, seen: View, means: Means) -> Step | Stop:
        if _every_probe_fails_alike(seen):
            return Stop(proven="not proven infeasible")
        step = self._opening(seen) or self._search(seen)
        if isinstance(step, Step) and not self._affordable(step, seen, means):
            step = Stop(proven="budget spent")
        if isinstance(step, Stop):
            chosen = confirmation(seen, means.seconds)
            return step if chosen is None else Step(purpose="confirm", pool=self.ground.table.places([chosen]))
        return step

    def _opening(self, seen: View) -> Step | None:
        """The most promising of what surely fits, then the baseline, whatever became of the first; a baseline that cannot fit is
        not tried. Where nothing else is as safe, it is the first."""
        baseline = self.ground.baseline
        if not seen.probes and not seen.pending:
            first = self._safest(self.ground.tiers[0], seen)
            if first is not None and (self._are_safe(first, seen) or not self._is_safe(baseline, seen)):
                return Step(purpose="anchor", pool=first)
        if baseline is not None and seen.is_open(baseline):
            return Step(purpose="baseline", pool=self.ground.table.places([baseline]))
        return None

    def _is_safe(self, candidate: Candidate | None, seen: View) -> bool:
        return candidate is not None and self._are_safe(self.ground.table.places([candidate]), seen)

    def _are_safe(self, places: Places, seen: View) -> bool:
        """Whether all of them are predicted to fit."""
        return bool(self.ground.mind.predicted[places].all() and (seen.beliefs.fits[places] >= SURELY).all())

    def _search(self, seen: View) -> Step | Stop:
        """In the first tier that fits; before that, whatever preferred one may fit after all."""
        fitting = seen.tier_of_choice()
        for tier in self.ground.tiers:
            if tier is fitting:
                return self._inside(tier, seen) or self._doubted(tier, seen) or Stop(proven="no better candidate possible")
            first = self._safest(tier, seen)
            if first is not None and seen.beliefs.fits[first].max() >= (REMOTE if fitting else PLAUSIBLE):
                return Step(purpose="anchor", pool=first)
            if first is None and (step := self._doubted(tier, seen)):
                return step
        return self._last_resort(seen)

    def _last_resort(self, seen: View) -> Step | Stop:
        """Nothing is likely to fit: what is likeliest of all says the most about the rest. That nothing fits is never a
        prediction's word alone."""
        firsts = [first for tier in self.ground.tiers if (first := self._safest(tier, seen)) is not None]
        if not firsts:
            refused = np.concatenate([seen.refused_in(tier) for tier in self.ground.tiers])
            if not len(refused):
                return Stop(proven="no better candidate possible")
            if sum(trial.purpose == "refused" for trial in seen.probes) >= LAST_RESORTS:
                return Stop(proven="not proven infeasible")
            least = refused[[int(seen.beliefs.need.mean[refused].argmin())]]
            return Step(purpose="refused", pool=least)
        return Step(purpose="anchor", pool=max(firsts, key=lambda first: float(seen.beliefs.fits[first].max())))

    def _safest(self, tier: Tier, seen: View) -> Places | None:
        """Of what may fit in the tier, that of which it is surest; without predictions, the least demanding."""
        pool = seen.open_in(tier)
        if not len(pool):
            return None
        if not self.ground.mind.predicted[pool].any():
            return np.array([self.ground.table.least_demanding(pool)])
        odds = seen.beliefs.fits[pool]
        return pool[odds >= min(SURELY, float(odds.max()))]

    def _inside(self, tier: Tier, seen: View) -> Step | Stop | None:
        pool = seen.open_in(tier)
        if not len(pool):
            return None
        if self.weighs:
            contenders = seen.contenders(tier)
            if len(remembered := self._remembered(pool, speed_of(contenders[0]))):
                return Step(purpose="search", pool=remembered)
            pool = pool[promising(seen.beliefs, pool, seen.leader(contenders))]
            return Step(purpose="search", pool=pool) if len(pool) else None
        loads = self.ground.table.loads
        if stopped_improving(tier, [self.ground.table.candidates[place] for place in pool], seen):
            return Stop(proven="stopped improving")
        return Step(purpose="search", pool=on_one_load(tier, pool, loads, self.ground.table.load_number, seen))

    def _remembered(self, pool: Places, best: float) -> Places:
        """The fastest that an earlier search saw fit, where that is faster than the best here: all others are held against it."""
        place, open_here = self.ground.table.place, set(pool.tolist())
        fitting = [one for one in self.earlier if one.verdict.fits and place.get(one.candidate.id) in open_here]
        fastest = max(fitting, key=speed_of, default=None)
        return pool[:0] if fastest is None or speed_of(fastest) <= best else self.ground.table.places([fastest.candidate])

    def _doubted(self, tier: Tier, seen: View) -> Step | None:
        """The nearest to fitting of what is refused in the tier, if it would be worth having."""
        pool, asked = seen.refused_in(tier), [trial for trial in seen.probed_in(tier) if trial.purpose == "refused"]
        if len(asked) >= REFUSED_PROBES or any(not trial.verdict.fits for trial in asked):
            return None
        if contenders := seen.contenders(tier):
            if any(ran_out(trial.measurement) for trial in seen.probed_in(tier)):
                return None  # where the limit lies was measured
            best = np.log(speed_of(contenders[0]) * 1.02)
            pool = pool[seen.beliefs.speed.mean[pool] > best]
        odds = seen.beliefs.fits[pool]
        if not len(pool) or odds.max() < HOPELESS_ODDS:
            return None
        return Step(purpose="refused", pool=pool[[int(odds.argmax())]])

    def _affordable(self, step: Step, seen: View, means: Means) -> bool:
        """Whether a probe can be paid for, with one confirmation of the incumbent kept in hand."""
        if means.probes <= 0:
            return False
        best, table = seen.best(), self.ground.table
        ready = means.live or {trial.candidate.load_key for trial in seen.probes[-1:]}
        live = [table.load_number[key] for key in ready if key in table.load_number]
        loads = not np.isin(table.loads[step.pool], live).any()
        reserve = 0.0
        if best is not None:
            reserve = 2 * seen.usual_seconds(load=loads or best.candidate.load_key not in ready)
        return means.seconds > seen.usual_seconds(load=loads) + reserve


def _every_probe_fails_alike(seen: View) -> bool:
    """Whether the last ones ended in one failure that is not the candidates': a reward function that raises, say."""
    last = seen.probes[-ALIKE:]
    if len(last) < ALIKE or any(trial.verdict.fits or not _broke(trial) for trial in seen.probes):
        return False
    return len({trial.measurement.failure.evidence for trial in last if trial.measurement.failure}) == 1


def _broke(trial: Trial) -> bool:
    return trial.measurement.outcome in (Outcome.CRASH, Outcome.TIMEOUT)
