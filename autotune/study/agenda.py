"""What to measure next, and when to stop: a pure function of what has been measured so far.

Because nothing else is remembered, a study that was killed goes on where it stood.

    anchor     the least demanding candidate of the most preferred tier, then of each next one, until one fits
    baseline   the user's own configuration, so that there is something to compare with
    search     the rest of the first tier that fits, one loaded model or engine after the other
    confirm    the fastest few again, longer and in turns; the best of these is the answer
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.candidate import Candidate
from autotune.measurement import Outcome
from autotune.recommendation import Proven, Purpose, Trial
from autotune.space import SearchSpace
from autotune.study.implied import least_demanding
from autotune.study.preference import Tier
from autotune.study.view import View, speed_of

FINALISTS = 4
"""At most this many candidates are measured again before one is recommended."""

CLOSE = 0.12
"""A candidate this much slower than the fastest, in one short probe, may still be the fastest."""

ROUNDS = 3
"""Finalists take so many turns, so that a machine that is slow for a while is slow for all of them."""

BEHIND = 0.06
"""A finalist this much behind the leader after a round is out of the next."""

GAIN = 0.02
"""Less than this is no improvement."""

PATIENCE = 12
"""Stop after this many probes without an improvement, once every load of the tier was tried."""

HOPELESS = 0.6
"""Leave a loaded model or engine whose best stays below this share of the incumbent, after TRIED probes on it."""

TRIED = 4

ALIKE = 3
"""So many probes in a row that end in the very same failure, before anything has fitted, say that every probe will."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Measure one of these candidates, for this purpose."""

    purpose: Purpose
    pool: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Nothing more to measure."""

    proven: Proven


@dataclass(frozen=True, kw_only=True)
class Means:
    """What is left to spend."""

    seconds: float
    probes: int


@dataclass(frozen=True, kw_only=True)
class Agenda:
    """The fixed part of the question: what could be measured."""

    space: SearchSpace
    tiers: tuple[Tier, ...]
    baseline: Candidate | None
    screened: frozenset[str] = frozenset()
    """Candidates that cannot fit, by prediction: they are not measured."""

    def view(self, trials: tuple[Trial, ...]) -> View:
        return View(self.space, self.tiers, trials, self.screened)

    def next(self, trials: tuple[Trial, ...], means: Means) -> Step | Stop:
        """The next step, given everything measured and what is left to spend."""
        seen = self.view(trials)
        if _every_probe_fails_alike(seen):
            return Stop(proven="not proven infeasible")
        step = self._opening(seen) or self._search(seen)
        if isinstance(step, Step) and not _affordable(step, seen, means):
            step = Stop(proven="budget spent")
        if isinstance(step, Stop):
            return _confirmation(seen, means) or step
        return step

    def _opening(self, seen: View) -> Step | None:
        """The safe first candidate, then the baseline, whatever became of the first; a baseline that cannot fit is not tried."""
        first = least_demanding(self.space, self.tiers[0].candidates)[0]
        if seen.is_open(first):
            return Step(purpose="anchor", pool=(first,))
        if self.baseline is not None and self.baseline.id not in seen.measured and self.baseline.id not in self.screened:
            return Step(purpose="baseline", pool=(self.baseline,))
        return None

    def _search(self, seen: View) -> Step | Stop:
        for tier in self.tiers:
            if seen.contenders(tier):
                return self._inside(tier, seen)
            if step := self._first_fit_in(tier, seen):
                return step
        return Stop(proven="no better candidate possible")

    def _first_fit_in(self, tier: Tier, seen: View) -> Step | None:
        """Look for one candidate of the tier that fits, the least demanding ones first."""
        for candidate in least_demanding(self.space, tier.candidates):
            if seen.is_open(candidate):
                return Step(purpose="anchor", pool=(candidate,))
        rest = seen.open_in(tier)
        return Step(purpose="search", pool=tuple(rest)) if rest else None

    def _inside(self, tier: Tier, seen: View) -> Step | Stop:
        pool = seen.open_in(tier)
        if not pool:
            return Stop(proven="no better candidate possible")
        if _stopped_improving(tier, pool, seen):
            return Stop(proven="stopped improving")
        return Step(purpose="search", pool=_on_one_load(tier, pool, seen))


def _on_one_load(tier: Tier, pool: list[Candidate], seen: View) -> tuple[Candidate, ...]:
    """The part of the pool that the live rig can measure without loading, while that promises anything."""
    if seen.probes:
        live = seen.probes[-1].candidate.load_key
        here = tuple(candidate for candidate in pool if candidate.load_key == live)
        if here and not _hopeless(tier, live, seen):
            return here
    untried = tuple(candidate for candidate in pool if not _hopeless(tier, candidate.load_key, seen))
    return untried or tuple(pool)


def _hopeless(tier: Tier, load_key: str, seen: View) -> bool:
    on_it = [trial for trial in seen.probed_in(tier) if trial.candidate.load_key == load_key]
    best = max((speed_of(trial) for trial in seen.contenders(tier)), default=0.0)
    return len(on_it) >= TRIED and max(speed_of(trial) for trial in on_it) < HOPELESS * best


def _every_probe_fails_alike(seen: View) -> bool:
    """Whether the last ones ended in one failure that is not the candidates': a reward function that raises, say."""
    last = seen.probes[-ALIKE:]
    if len(last) < ALIKE or any(trial.verdict.fits or not _broke(trial) for trial in seen.probes):
        return False
    return len({trial.measurement.failure.evidence for trial in last if trial.measurement.failure}) == 1


def _broke(trial: Trial) -> bool:
    return trial.measurement.outcome in (Outcome.CRASH, Outcome.TIMEOUT)


def _stopped_improving(tier: Tier, pool: list[Candidate], seen: View) -> bool:
    """Whether every load was tried, and the last PATIENCE probes brought nothing."""
    probed = seen.probed_in(tier)
    tried = {trial.candidate.load_key for trial in probed}
    if any(candidate.load_key not in tried for candidate in pool):
        return False
    best, since = 0.0, 0
    for trial in probed:
        speed = speed_of(trial) if trial.verdict.fits else 0.0
        since = 0 if speed > best * (1 + GAIN) else since + 1
        best = max(best, speed)
    return since >= PATIENCE


def _affordable(step: Step, seen: View, means: Means) -> bool:
    """Whether a probe can be paid for, with one confirmation of the incumbent kept in hand."""
    if means.probes <= 0:
        return False
    best = seen.best()
    loads = not seen.probes or all(one.load_key != seen.probes[-1].candidate.load_key for one in step.pool)
    reserve = (
        0.0
        if best is None
        else 2 * seen.usual_seconds(load=loads or best.candidate.load_key != seen.probes[-1].candidate.load_key)
    )
    return means.seconds > seen.usual_seconds(load=loads) + reserve


def _confirmation(seen: View, means: Means) -> Step | None:
    """The next finalist to measure again: the fastest always, the others and further rounds while time is left."""
    tier = seen.tier_of_choice()
    if tier is None:
        return None
    contenders = seen.contenders(tier)
    finalists = [trial for trial in contenders if speed_of(trial) >= (1 - CLOSE) * speed_of(contenders[0])][:FINALISTS]
    anything_confirmed = any(trial.candidate.id in seen.rounds for trial in finalists)
    if means.seconds <= (2 * seen.usual_seconds(load=True) if anything_confirmed else 0.0):
        return None
    for number in range(ROUNDS):
        for trial in _turns(finalists, number, seen):
            if len(seen.rounds.get(trial.candidate.id, ())) <= number:
                return Step(purpose="confirm", pool=(trial.candidate,))
    return None


def _turns(finalists: list[Trial], number: int, seen: View) -> list[Trial]:
    """Who is measured in this round, in which order: one load after the other, every second round backwards."""
    if number > 0:
        best = max(_confirmed_speed(trial, seen) for trial in finalists)
        finalists = [trial for trial in finalists if _confirmed_speed(trial, seen) >= (1 - BEHIND) * best]
        if len(finalists) == 1:
            return []
    first = finalists[0].candidate.load_key
    ordered = sorted(finalists, key=lambda trial: (trial.candidate.load_key != first, trial.candidate.load_key))
    return ordered[::-1] if number % 2 else ordered


def _confirmed_speed(trial: Trial, seen: View) -> float:
    return speed_of(seen.confirmations.get(trial.candidate.id, trial))
