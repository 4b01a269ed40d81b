"""View of the trials so far, with the queries of the agenda.

Tiers are groups of candidates with equal learning knobs, most preferred first. Tokens per second
are compared within a tier. Between tiers the space's declared order decides: the knob that relaxes
first varies fastest, so the first tier that fits preserves the most protected knobs.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autotune.core.answer import Trial
from autotune.core.measurement import Outcome, Speed, highest_by_phase, judge
from autotune.core.run_statistics import RunSpread, learn_run_spread
from autotune.core.space import Candidate, KnobValue, SearchSpace
from autotune.search.surrogate.candidate_table import BoolArray, IndexArray
from autotune.search.surrogate.estimates import Estimates, SurrogateModel


@dataclass(frozen=True, kw_only=True, eq=False)
class Tier:
    """All candidates with the same learning knobs."""

    learning: dict[str, KnobValue]  # Common values of the learning knobs
    candidates: tuple[Candidate, ...]


def tiers_of(space: SearchSpace, candidates: Iterable[Candidate]) -> tuple[Tier, ...]:
    """Group the candidates, most preferred tier first; a space for throughput alone is a single
    tier.
    """
    if space.objective == "throughput":
        return (Tier(learning={}, candidates=tuple(candidates)),)
    groups: dict[tuple[int, ...], list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(_rank(space, candidate), []).append(candidate)
    return tuple(
        Tier(learning=learning_values(space, members[0]), candidates=tuple(members))
        for _, members in sorted(groups.items())
    )


def learning_values(space: SearchSpace, candidate: Candidate) -> dict[str, KnobValue]:
    """Return the candidate's learning knobs, which identify its tier."""
    knobs = space.learning_knobs(candidate.settings)
    return {knob.name: candidate.knobs[knob.name] for knob in knobs if knob.name in candidate.knobs}


def _rank(space: SearchSpace, candidate: Candidate) -> tuple[int, ...]:
    """Return each learning knob's position in its preference order, the most protected knob
    first.
    """
    learning = space.learning_knobs(candidate.settings)
    never_relaxed = [knob for knob in learning if knob.name not in space.relax]
    relaxed = sorted(
        (knob for knob in learning if knob.name in space.relax),
        key=lambda knob: -space.relax.index(knob.name),
    )
    ordered = (knob for knob in [*never_relaxed, *relaxed] if knob.name in candidate.knobs)
    return tuple(knob.choices.index(candidate.knobs[knob.name]) for knob in ordered)


def pooled(confirmations: Sequence[Trial]) -> Trial:
    """Return the confirmations of one candidate as one trial; a failed one represents all. One
    long probe cannot separate a fast candidate from a temporarily fast machine, so finalists
    take turns.
    """
    failed = next((trial for trial in confirmations if not trial.verdict.fits), None)
    if failed is not None or len(confirmations) == 1:
        return failed or confirmations[0]
    measurements = [trial.measurement for trial in confirmations]
    memories, costs = [one.memory for one in measurements], [one.cost for one in measurements]
    highest = max(memories, key=lambda memory: memory.peak_bytes or 0)
    device = [cost.device_seconds for cost in costs if cost.device_seconds is not None]
    summed = ("total_seconds", "load_seconds", "setup_seconds", "loop_seconds")
    together = replace(
        measurements[-1],
        memory=replace(highest, phase_peak_bytes=highest_by_phase(memories)),
        worst=_all_cycles([one.worst for one in measurements]),
        typical=_all_cycles([one.typical for one in measurements]),
        optimizer_steps=sum(one.optimizer_steps for one in measurements),
        cost=replace(
            costs[-1],
            **{name: sum(getattr(cost, name) for cost in costs) for name in summed},
            device_seconds=sum(device) if len(device) == len(costs) else None,
        ),
    )
    return replace(confirmations[-1], measurement=together, verdict=judge(together))


def _all_cycles(speeds: Sequence[Speed | None]) -> Speed | None:
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return None
    seconds: Counter[str] = Counter()
    for speed in known:
        seconds.update(speed.phase_seconds)
    return replace(
        known[-1],
        cycle_seconds=tuple(cycle for speed in known for cycle in speed.cycle_seconds),
        cycle_loss_tokens=tuple(tokens for speed in known for tokens in speed.cycle_loss_tokens),
        prompt_tokens=sum(speed.prompt_tokens for speed in known),
        phase_seconds=dict(seconds),
        user_reward_seconds=sum(speed.user_reward_seconds for speed in known),
        cut_short=any(speed.cut_short for speed in known),
        runs=sum(speed.runs for speed in known),
    )


MAX_ATTEMPTS = (
    3  # Attempts at a candidate whose probes were ended from outside: the first, and two more
)


def speed_of(trial: Trial) -> float:
    """Return the speed by which a trial is ranked; -inf if it has none."""
    speed = trial.measurement.ranking_speed
    return speed.tokens_per_second if speed else float("-inf")


def _given_up(trials: Iterable[Trial]) -> set[int]:
    """Return the numbers of trials that were the last attempt at a candidate which was ended
    from outside every time. They count as measured, and as interrupted.
    """
    attempts: Counter[tuple[str, bool]] = Counter()
    found = set()
    for trial in trials:
        if trial.measurement.ended_from_outside:
            key = (trial.candidate.id, trial.purpose == "confirm")
            attempts[key] += 1
            if attempts[key] == MAX_ATTEMPTS:
                found.add(trial.number)
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class SearchProblem:
    """Fixed part of a study."""

    tiers: tuple[Tier, ...]
    surrogate: SurrogateModel
    baseline: Candidate | None
    uses_surrogate: bool = (
        True  # False for Optuna's own samplers, which choose within the tier by themselves
    )
    earlier: tuple[Trial, ...] = ()
    """Trials of other studies on the same model, versions and hardware: evidence, not counted as
    measured here.
    """

    @cached_property
    def rows(self) -> dict[Tier, IndexArray]:
        return {tier: self.surrogate.table.rows_of(tier.candidates) for tier in self.tiers}

    @cached_property
    def tier_of(self) -> dict[str, Tier]:
        return {one.id: tier for tier in self.tiers for one in tier.candidates}


class TrialView:
    """State derived from the recorded trials alone, so that a resumed study continues
    identically.
    """

    def __init__(
        self, problem: SearchProblem, trials: Sequence[Trial], pending: frozenset[str] = frozenset()
    ) -> None:
        """`pending`: ids of candidates under measurement, which no other driver starts."""
        self.problem, self.table = problem, problem.surrogate.table
        self.tiers, self.baseline = problem.tiers, problem.baseline
        self.all = tuple(trials)
        given_up = _given_up(trials)
        self.completed = [
            trial
            for trial in trials
            if trial.measurement.outcome is not Outcome.INTERRUPTED or trial.number in given_up
        ]
        self.probes = [trial for trial in self.completed if trial.purpose != "confirm"]
        self.rounds: dict[str, list[Trial]] = {}
        for trial in self.completed:
            if trial.purpose == "confirm":
                self.rounds.setdefault(trial.candidate.id, []).append(trial)
        self.confirmations = {
            candidate_id: pooled(trials) for candidate_id, trials in self.rounds.items()
        }
        self.measured: Mapping[str, Trial] = {trial.candidate.id: trial for trial in self.probes}
        # A confirmation's speed must not reopen a finished search; a confirmation that ran out of
        # memory may.
        informative = [
            trial
            for trial in self.completed
            if trial.purpose != "confirm" or not trial.verdict.fits
        ]
        self._observed = [*problem.earlier, *informative]
        self.pending = pending
        self._contenders: dict[Tier, list[Trial]] = {}

    @cached_property
    def estimates(self) -> Estimates:
        """Surrogate estimates, computed on first use: they take most of a driver's time."""
        return self.problem.surrogate.estimate(self._observed, self.pending)

    @cached_property
    def _measured(self) -> BoolArray:
        return self.table.mask(self.measured)

    @cached_property
    def _implied(self) -> BoolArray:
        return np.asarray(
            self.problem.surrogate.implied(self._observed).impossible & ~self._measured
        )

    @cached_property
    def _refused(self) -> BoolArray:
        if not self.problem.surrogate.screens:
            return np.zeros_like(self._measured)
        return np.asarray(self.estimates.refused & ~self._measured & ~self._implied)

    @cached_property
    def _pending(self) -> BoolArray:
        return self.table.mask(self.pending)

    @cached_property
    def _open(self) -> BoolArray:
        return np.asarray(~(self._measured | self._implied | self._refused | self._pending))

    @property
    def implied(self) -> frozenset[str]:
        """Ids of the candidates that measured out-of-memory errors rule out."""
        return self._ids(self._implied)

    @property
    def screened(self) -> frozenset[str]:
        """Ids of the candidates that the corrected prediction rules out."""
        return self._ids(self._refused)

    def is_open(self, candidate: Candidate) -> bool:
        return bool(self._open[self.table.row_by_id[candidate.id]])

    def open_in(self, tier: Tier) -> IndexArray:
        return self._in_tier(tier, self._open)

    def refused_in(self, tier: Tier) -> IndexArray:
        return self._in_tier(tier, np.asarray(self._refused & ~self._pending))

    def probed_in(self, tier: Tier) -> list[Trial]:
        """Return the tier's trials in order of measurement."""
        return [
            trial for trial in self.probes if self.problem.tier_of.get(trial.candidate.id) is tier
        ]

    def contenders(self, tier: Tier) -> list[Trial]:
        """Return the tier's trials that fit and that no confirmation refuted, fastest first."""
        if tier not in self._contenders:
            refuted = {
                name for name, together in self.confirmations.items() if not together.verdict.fits
            }
            fitting = [
                trial
                for trial in self.probed_in(tier)
                if trial.verdict.fits and trial.candidate.id not in refuted
            ]
            self._contenders[tier] = sorted(fitting, key=speed_of, reverse=True)
        return self._contenders[tier]

    def tier_of_choice(self) -> Tier | None:
        """Return the most preferred tier with a candidate that fits."""
        return next((tier for tier in self.tiers if self.contenders(tier)), None)

    def best(self) -> Trial | None:
        """Return the incumbent: the fastest of the tier of choice, by confirmation if there is
        any.
        """
        tier = self.tier_of_choice()
        if tier is None:
            return None
        contenders = self.contenders(tier)
        confirmed = [
            self.confirmations[trial.candidate.id]
            for trial in contenders
            if trial.candidate.id in self.confirmations
        ]
        return (
            self.measured[max(confirmed, key=speed_of).candidate.id] if confirmed else contenders[0]
        )

    def leader(self, contenders: Iterable[Trial]) -> int:
        """Return the row with the highest estimated speed, which a single lucky probe moves
        little.
        """
        rows = (self.table.row_by_id[trial.candidate.id] for trial in contenders)
        return max(rows, key=lambda row: float(self.estimates.speed.mean[row]))

    def same_tier_contenders(self, candidate: Candidate) -> list[Trial]:
        """Return the contenders of this candidate's tier, fastest first."""
        tier = self.problem.tier_of.get(candidate.id)
        return [] if tier is None else self.contenders(tier)

    def fitting_baseline(self) -> Trial | None:
        """Return the baseline's probe if it fits, was requested, and has the learning knobs of
        the tier of choice: else its speed is not comparable.
        """
        tier, baseline = self.tier_of_choice(), self.baseline
        if tier is None or baseline is None or baseline.id not in self.problem.tier_of:
            return None
        if (trial := self.measured.get(baseline.id)) is None:
            return None
        fits = trial.verdict.fits and self.confirmations.get(baseline.id, trial).verdict.fits
        return (
            trial
            if fits
            and all(baseline.knobs.get(name) == value for name, value in tier.learning.items())
            else None
        )

    def usual_seconds(self, *, load: bool) -> float:
        """Return the expected seconds of a further probe; 0 before the first measurement."""
        if not self.probes:
            return 0.0
        costs = [trial.measurement.cost for trial in self.probes]
        probing = statistics.median(cost.total_seconds - cost.load_seconds for cost in costs)
        return probing + (max(cost.load_seconds for cost in costs) if load else 0.0)

    @cached_property
    def run_spread(self) -> RunSpread:
        """Spread between runs of one candidate, learned from those that were measured
        repeatedly.
        """
        runs: dict[str, list[Speed]] = {}
        for trial in self.completed:
            if trial.verdict.fits and (speed := trial.measurement.ranking_speed) is not None:
                runs.setdefault(trial.candidate.id, []).append(speed)
        return learn_run_spread(runs.values())

    def _in_tier(self, tier: Tier, mask: BoolArray) -> IndexArray:
        rows = self.problem.rows[tier]
        return rows[mask[rows]]

    def _ids(self, mask: BoolArray) -> frozenset[str]:
        return frozenset(self.table.candidates[row].id for row in np.flatnonzero(mask))
