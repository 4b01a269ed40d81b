"""View of the trials so far: all that the agenda, the sampler and the conclusion ask of them.

It is computed from the search problem and the recorded trials alone, so that a resumed study
continues identically. It depends on no storage and on no loop.

Tiers are groups of candidates with equal learning knobs, most preferred first. Tokens per second
are compared within a tier. Between tiers the space's declared order decides: the knob that relaxes
first varies fastest, so the first tier that fits preserves the most protected knobs.

States of a candidate, of which the first that applies counts:

    measured   a probe has ended, or was ended from outside MAX_ATTEMPTS times
    implied    a measured out-of-memory error rules it out
    refused    the corrected prediction rules it out ("screened" in the answer)
    pending    under measurement by a driver of the study
    open       none of these
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autotune.core.answer import Trial
from autotune.core.headroom import NO_HEADROOM, Headroom
from autotune.core.measurement import Outcome, Speed, Verdict
from autotune.core.prediction import Prediction
from autotune.core.run_statistics import RunSpread, learn_run_spread
from autotune.core.space import Candidate, KnobValue, SearchSpace
from autotune.search.pooling import pooled
from autotune.search.surrogate.candidate_table import BoolArray, IndexArray
from autotune.search.surrogate.estimates import Estimates, SurrogateModel

# Attempts at a candidate whose probes were ended from outside: the first, and two more
MAX_ATTEMPTS = 3


@dataclass(
    frozen=True,
    kw_only=True,
    eq=False,
)
class Tier:
    """All candidates with the same learning knobs."""

    learning: dict[str, KnobValue]  # Common values of the learning knobs
    candidates: tuple[Candidate, ...]


def tiers_of(space: SearchSpace, candidates: Iterable[Candidate]) -> tuple[Tier, ...]:
    """Group the candidates, most preferred tier first; a space for throughput alone is a single
    tier.
    """
    if space.objective == "throughput":
        only_tier = Tier(learning={}, candidates=tuple(candidates))
        return (only_tier,)
    groups: dict[tuple[int, ...], list[Candidate]] = {}
    for candidate in candidates:
        rank = _rank(space, candidate)
        groups.setdefault(rank, []).append(candidate)
    tiers = []
    for _, members in sorted(groups.items()):
        learning = learning_values(space, members[0])
        tier = Tier(learning=learning, candidates=tuple(members))
        tiers.append(tier)
    return tuple(tiers)


def learning_values(space: SearchSpace, candidate: Candidate) -> dict[str, KnobValue]:
    """Return the candidate's learning knobs, which identify its tier."""
    values = {}
    for knob in space.learning_knobs(candidate.settings):
        if knob.name in candidate.knobs:
            values[knob.name] = candidate.knobs[knob.name]
    return values


def _rank(space: SearchSpace, candidate: Candidate) -> tuple[int, ...]:
    """Return each learning knob's position in its preference order, the most protected knob
    first.
    """
    values = learning_values(space, candidate)
    names = [name for name in values if name not in space.relax]
    names += [name for name in reversed(space.relax) if name in values]
    ranks = []
    for name in names:
        choices = space[name].choices
        ranks.append(choices.index(values[name]))
    return tuple(ranks)


def speed_of(trial: Trial) -> float:
    """Return the speed by which a trial is ranked; -inf if it has none."""
    speed = trial.measurement.ranking_speed
    return speed.tokens_per_second if speed else float("-inf")


@dataclass(
    frozen=True,
    kw_only=True,
    eq=False,
)
class SearchProblem:
    """Fixed part of a study."""

    tiers: tuple[Tier, ...]
    surrogate: SurrogateModel
    baseline: Candidate | None
    # False for Optuna's own samplers, which choose within the tier by themselves
    uses_surrogate: bool = True
    # Predicted tokens per second by candidate id, where no speed is measured: on emulated GPUs
    predicted_rates: Mapping[str, float] = field(default_factory=dict)
    # Trials of other studies on the same model, versions and hardware: evidence, not counted as
    # measured here
    earlier: tuple[Trial, ...] = ()
    predictions: Mapping[str, Prediction] = field(default_factory=dict)  # By candidate id
    headroom: Headroom = NO_HEADROOM  # Left free by a recommendation

    @cached_property
    def rows(self) -> dict[Tier, IndexArray]:
        table = self.surrogate.table
        return {tier: table.rows_of(tier.candidates) for tier in self.tiers}

    @cached_property
    def tier_of(self) -> dict[str, Tier]:
        """Tier by candidate id."""
        tiers = {}
        for tier in self.tiers:
            for candidate in tier.candidates:
                tiers[candidate.id] = tier
        return tiers


class TrialView:
    """State derived from the recorded trials."""

    def __init__(
        self,
        problem: SearchProblem,
        trials: Sequence[Trial],
        pending: frozenset[str] = frozenset(),
    ) -> None:
        """`pending`: ids of candidates under measurement, which no other driver starts."""
        self.problem = problem
        self.table = problem.surrogate.table
        self.tiers = problem.tiers
        self.baseline = problem.baseline
        self.all = tuple(trials)
        self.pending = pending

        # 1. Trials that count: an interrupted one does not, unless its candidate is given up.
        last_attempts = _last_attempts(trials)
        self.completed: list[Trial] = []
        for trial in trials:
            interrupted = trial.measurement.outcome is Outcome.INTERRUPTED
            if not interrupted or trial.number in last_attempts:
                self.completed.append(trial)

        # 2. Probes of the search, and confirmations of its finalists.
        self.probes: list[Trial] = []
        self.rounds: dict[str, list[Trial]] = {}  # Confirmations by candidate id
        for trial in self.completed:
            if trial.purpose == "confirm":
                confirmations = self.rounds.setdefault(trial.candidate.id, [])
                confirmations.append(trial)
            else:
                self.probes.append(trial)
        self.measured: dict[str, Trial] = {}  # Last probe by candidate id
        for trial in self.probes:
            self.measured[trial.candidate.id] = trial
        self.confirmations: dict[str, Trial] = {}  # Pooled, by candidate id
        for candidate_id, confirmations in self.rounds.items():
            self.confirmations[candidate_id] = pooled(confirmations)
        self._contenders: dict[Tier, list[Trial]] = {}

    # 1. Estimates, and the states of the candidates.

    @cached_property
    def estimates(self) -> Estimates:
        """Surrogate estimates, computed on first use: they take most of a driver's time."""
        noise = self.run_spread.deviation
        return self.problem.surrogate.estimate(self._observed, self.pending, noise)

    @cached_property
    def _observed(self) -> list[Trial]:
        """Trials that the estimates use. A confirmation tells them how far two runs differ, but its
        speed must not reopen a finished search; a confirmation that ran out of memory may.
        """
        observed = list(self.problem.earlier)
        for trial in self.completed:
            if trial.purpose != "confirm" or not trial.verdict.fits:
                observed.append(trial)
        return observed

    @cached_property
    def _measured(self) -> BoolArray:
        return self.table.mask(self.measured)

    @cached_property
    def _implied(self) -> BoolArray:
        implications = self.problem.surrogate.implied(self._observed)
        impossible = implications.impossible
        return impossible & ~self._measured

    @cached_property
    def _refused(self) -> BoolArray:
        if not self.problem.surrogate.screens:
            return np.zeros_like(self._measured)
        is_unmeasured = self.estimates.refused & ~self._measured
        return is_unmeasured & ~self._implied

    @cached_property
    def _pending(self) -> BoolArray:
        return self.table.mask(self.pending)

    @cached_property
    def _open(self) -> BoolArray:
        is_decided = self._measured | self._implied | self._refused
        return ~(is_decided | self._pending)

    @property
    def implied(self) -> frozenset[str]:
        """Ids of the candidates that measured out-of-memory errors rule out."""
        return self._ids(self._implied)

    @property
    def screened(self) -> frozenset[str]:
        """Ids of the candidates that the corrected prediction rules out."""
        return self._ids(self._refused)

    def _ids(self, mask: BoolArray) -> frozenset[str]:
        candidates = self.table.candidates
        rows = np.flatnonzero(mask)
        return frozenset(candidates[row].id for row in rows)

    def is_open(self, candidate: Candidate) -> bool:
        row = self.table.row_by_id[candidate.id]
        return bool(self._open[row])

    @property
    def open_baseline(self) -> Candidate | None:
        """Return the baseline if it is still to be measured."""
        if self.baseline is None or not self.is_open(self.baseline):
            return None
        return self.baseline

    def open_in(self, tier: Tier) -> IndexArray:
        return self._in_tier(tier, self._open)

    def refused_in(self, tier: Tier) -> IndexArray:
        not_pending = self._refused & ~self._pending
        return self._in_tier(tier, not_pending)

    def _in_tier(self, tier: Tier, mask: BoolArray) -> IndexArray:
        rows = self.problem.rows[tier]
        return rows[mask[rows]]

    # 2. Trials by tier.

    def probed_in(self, tier: Tier) -> list[Trial]:
        """Return the tier's trials in order of measurement."""
        tier_of = self.problem.tier_of
        trials = []
        for trial in self.probes:
            if tier_of.get(trial.candidate.id) is tier:
                trials.append(trial)
        return trials

    def contenders(self, tier: Tier) -> list[Trial]:
        """Return the tier's trials that fit, leave the headroom free and that no confirmation
        refuted, fastest first.
        """
        if tier not in self._contenders:
            probed = self.probed_in(tier)
            fitting = [trial for trial in probed if self._is_recommendable(trial)]
            fitting.sort(key=speed_of, reverse=True)
            self._contenders[tier] = fitting
        return self._contenders[tier]

    def _is_recommendable(self, trial: Trial) -> bool:
        return self.verdict_on(trial).fits and self.verdict_on(self.evidence(trial)).fits

    def verdict_on(self, trial: Trial) -> Verdict:
        """Return the verdict on recommending this trial's candidate."""
        return self.problem.headroom.judge(trial.verdict, trial.measurement.memory)

    def same_tier_contenders(self, candidate: Candidate) -> list[Trial]:
        """Return the contenders of this candidate's tier, fastest first."""
        tier = self.problem.tier_of.get(candidate.id)
        return [] if tier is None else self.contenders(tier)

    def tier_of_choice(self) -> Tier | None:
        """Return the most preferred tier with a candidate that fits."""
        for tier in self.tiers:
            if self.contenders(tier):
                return tier
        return None

    def best(self) -> Trial | None:
        """Return the incumbent: the fastest of the tier of choice by everything measured, confirmed
        if any is.
        """
        tier = self.tier_of_choice()
        if tier is None:
            return None
        contenders = self.contenders(tier)
        confirmed = [trial for trial in contenders if self.is_confirmed(trial.candidate)]
        if not confirmed:
            return contenders[0]
        return max(confirmed, key=self.log_speed)

    def log_speed(self, trial: Trial) -> float:
        return self.belief(trial)[0]

    def belief(self, trial: Trial) -> tuple[float, float]:
        """Return mean and standard deviation of a measured candidate's log speed: the estimate from
        all probes, and the candidate's confirmations, each by its precision.
        """
        mean, deviation = self.estimate(trial)
        runs = self.confirmation_count(trial.candidate)
        confirmed_speed = speed_of(self.evidence(trial))
        if not runs or confirmed_speed <= 0:
            return mean, deviation
        log_speed = math.log(confirmed_speed)
        noise = self.run_spread.deviation
        # An estimate that its confirmations contradict counts less: the probe was lucky.
        usual_difference = 2 * math.hypot(deviation, noise)
        excess = max(0.0, abs(log_speed - mean) - usual_difference)
        precision = 1 / (deviation**2 + excess**2)
        confirmed_precision = runs / noise**2
        total = precision + confirmed_precision
        weighted = mean * precision + log_speed * confirmed_precision
        return weighted / total, total**-0.5

    def estimate(self, trial: Trial) -> tuple[float, float]:
        """Return mean and standard deviation of a measured candidate's log speed from all
        probes.
        """
        row = self.table.row_by_id[trial.candidate.id]
        mean = self.estimates.speed.mean[row]
        deviation = self.estimates.speed.deviation[row]
        return float(mean), float(deviation)

    def evidence(self, trial: Trial) -> Trial:
        """Return the candidate's pooled confirmations; without any, its probe."""
        return self.confirmations.get(trial.candidate.id, trial)

    def is_confirmed(self, candidate: Candidate) -> bool:
        return candidate.id in self.confirmations

    def confirmation_count(self, candidate: Candidate) -> int:
        confirmations = self.rounds.get(candidate.id, ())
        return len(confirmations)

    def pairs(self, candidate: Candidate, reference: Candidate) -> list[tuple[Speed, Speed]]:
        """Return the speeds of two candidates in the turns in which both were confirmed."""
        turns = self.rounds.get(candidate.id, ())
        reference_turns = self.rounds.get(reference.id, ())
        pairs = []
        for trial, reference_trial in zip(turns, reference_turns, strict=False):
            speed = trial.measurement.ranking_speed
            reference_speed = reference_trial.measurement.ranking_speed
            if speed is not None and reference_speed is not None:
                pairs.append((speed, reference_speed))
        return pairs

    def leader(self, contenders: Iterable[Trial]) -> int:
        """Return the row with the highest estimated speed, which a single lucky probe moves
        little.
        """
        rows = self.table.rows_of(trial.candidate for trial in contenders)
        speeds = self.estimates.speed.mean[rows]
        return int(rows[speeds.argmax()])

    def fitting_baseline(self) -> Trial | None:
        """Return the baseline's probe if it fits, was requested, and has the learning knobs of
        the tier of choice: else its speed is not comparable.
        """
        tier = self.tier_of_choice()
        baseline = self.baseline
        if tier is None or baseline is None or baseline.id not in self.problem.tier_of:
            return None
        trial = self.measured.get(baseline.id)
        if trial is None or not self._is_recommendable(trial):
            return None
        for name, value in tier.learning.items():
            if baseline.knobs.get(name) != value:
                return None
        return trial

    # 3. Cost and spread of the measurements.

    def usual_seconds(self, *, load: bool) -> float:
        """Return the expected seconds of a further probe; 0 before the first measurement."""
        if not self.probes:
            return 0.0
        probe_seconds = []
        load_seconds = []
        for trial in self.probes:
            cost = trial.measurement.cost
            measuring_seconds = cost.total_seconds - cost.load_seconds
            probe_seconds.append(measuring_seconds)
            load_seconds.append(cost.load_seconds)
        seconds = statistics.median(probe_seconds)
        if load:
            seconds += max(load_seconds)
        return seconds

    @cached_property
    def run_spread(self) -> RunSpread:
        """Spread between runs of one candidate, learned from those that were measured
        repeatedly.
        """
        runs: dict[str, list[Speed]] = {}
        for trial in self.completed:
            speed = trial.measurement.ranking_speed
            if trial.verdict.fits and speed is not None:
                speeds = runs.setdefault(trial.candidate.id, [])
                speeds.append(speed)
        return learn_run_spread(runs.values())


def _last_attempts(trials: Iterable[Trial]) -> set[int]:
    """Return the numbers of trials that were the last attempt at a candidate which was ended
    from outside every time. They count as measured, and as interrupted.
    """
    attempts: Counter[tuple[str, bool]] = Counter()
    last_attempts = set()
    for trial in trials:
        if trial.measurement.ended_from_outside:
            is_confirmation = trial.purpose == "confirm"
            key = (trial.candidate.id, is_confirmation)
            attempts[key] += 1
            if attempts[key] == MAX_ATTEMPTS:
                last_attempts.add(trial.number)
    return last_attempts
