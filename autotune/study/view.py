"""The trials so far, asked the questions that the agenda asks of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from autotune.candidate import Candidate
from autotune.measurement import Outcome
from autotune.recommendation import Trial
from autotune.study.beliefs import Beliefs, Mind
from autotune.study.pace import usual_scatter
from autotune.study.pool import pooled
from autotune.study.preference import Tier
from autotune.study.table import Flags, Numbers, Places, Table


def speed_of(trial: Trial) -> float:
    """The speed a trial is ranked by; below everything where there is none."""
    speed = trial.measurement.ranking_speed
    return speed.tokens_per_second if speed else float("-inf")


class Ground:
    """What stays the same while a study goes on: the candidates, and in which tier each is."""

    def __init__(self, table: Table, tiers: Sequence[Tier], mind: Mind, baseline: Candidate | None) -> None:
        self.table, self.tiers, self.mind, self.baseline = table, tuple(tiers), mind, baseline
        self.places = [table.places(tier.candidates) for tier in tiers]
        self.tier_number = {one.id: number for number, tier in enumerate(tiers) for one in tier.candidates}


class View:
    """What is known, derived anew from the recorded trials each time, so that a resumed study knows the same."""

    def __init__(
        self,
        ground: Ground,
        trials: Sequence[Trial],
        earlier: Sequence[Trial] = (),
        pending: frozenset[str] = frozenset(),
    ) -> None:
        """`pending`: ids of candidates that are being measured: nothing is known of them yet, and nobody else starts them."""
        telling = [trial for trial in trials if trial.measurement.outcome is not Outcome.INTERRUPTED]
        self.tiers, self.baseline = ground.tiers, ground.baseline
        self.all = tuple(trials)
        self.told = telling
        self.probes = [trial for trial in telling if trial.purpose != "confirm"]
        self.rounds: dict[str, list[Trial]] = {}
        for trial in telling:
            if trial.purpose == "confirm":
                self.rounds.setdefault(trial.candidate.id, []).append(trial)
        self.confirmations = {candidate_id: pooled(trials) for candidate_id, trials in self.rounds.items()}
        self.measured: Mapping[str, Trial] = {trial.candidate.id: trial for trial in self.probes}
        # How fast finalists turn out to be reopens no search that was done; that one of them ran out of memory may.
        telling_more = [trial for trial in telling if trial.purpose != "confirm" or not trial.verdict.fits]
        self._believed = [*earlier, *telling_more]
        self.pending = pending
        self._ground = ground
        self._contenders: dict[int, list[Trial]] = {}

    @cached_property
    def beliefs(self) -> Beliefs:
        """Thought of only when somebody asks: it is what takes the most of a driver's time."""
        return self._ground.mind.after(self._believed, self.pending)

    @cached_property
    def _measured(self) -> Flags:
        return self._ground.table.mask(self.measured)

    @cached_property
    def _implied(self) -> Flags:
        return self._ground.mind.settled(self._believed).impossible & ~self._measured

    @cached_property
    def _refused(self) -> Flags:
        if not self._ground.mind.screens:
            return np.zeros_like(self._measured)
        return self.beliefs.refused & ~self._measured & ~self._implied

    @cached_property
    def _pending(self) -> Flags:
        return self._ground.table.mask(self.pending)

    @cached_property
    def _open(self) -> Flags:
        return ~(self._measured | self._implied | self._refused | self._pending)

    @property
    def implied(self) -> frozenset[str]:
        """Ids of the candidates that cannot fit, given what ran out of memory so far."""
        return self._ids(self._implied)

    @property
    def screened(self) -> frozenset[str]:
        """Ids of the candidates that cannot fit, by the corrected prediction."""
        return self._ids(self._refused)

    def is_open(self, candidate: Candidate) -> bool:
        return bool(self._open[self._ground.table.place[candidate.id]])

    def open_in(self, tier: Tier) -> Places:
        return self._those(tier, self._open)

    def refused_in(self, tier: Tier) -> Places:
        return self._those(tier, self._refused & ~self._pending)

    def probed_in(self, tier: Tier) -> list[Trial]:
        """The tier's trials in the order in which they were measured."""
        number = self._number(tier)
        return [trial for trial in self.probes if self._ground.tier_number.get(trial.candidate.id) == number]

    def contenders(self, tier: Tier) -> list[Trial]:
        """What fits in the tier and was not refuted by a confirmation, fastest first."""
        number = self._number(tier)
        if number not in self._contenders:
            refuted = {name for name, together in self.confirmations.items() if not together.verdict.fits}
            fitting = [trial for trial in self.probed_in(tier) if trial.verdict.fits and trial.candidate.id not in refuted]
            self._contenders[number] = sorted(fitting, key=speed_of, reverse=True)
        return self._contenders[number]

    def tier_of_choice(self) -> Tier | None:
        """The most preferred tier in which something fits."""
        return next((tier for tier in self.tiers if self.contenders(tier)), None)

    def best(self) -> Trial | None:
        """The incumbent: the fastest of the tier of choice, by its confirmation where there is one."""
        tier = self.tier_of_choice()
        if tier is None:
            return None
        contenders = self.contenders(tier)
        confirmed = [self.confirmations[trial.candidate.id] for trial in contenders if trial.candidate.id in self.confirmations]
        if confirmed:
            winner = max(confirmed, key=speed_of).candidate.id
            return self.measured[winner]
        return contenders[0]

    def leader(self, contenders: Sequence[Trial]) -> int:
        """The place of the one that is believed to be the fastest of these: a single lucky probe does not make it so."""
        return max(
            (self._ground.table.place[trial.candidate.id] for trial in contenders),
            key=lambda one: float(self.beliefs.speed.mean[one]),
        )

    def leader_beside(self, candidate: Candidate) -> int | None:
        """The leader among those that fit and learn the same as this candidate."""
        contenders = self._beside(candidate)
        return self.leader(contenders) if contenders else None

    def fastest_beside(self, candidate: Candidate) -> float | None:
        """The best speed among those that fit and learn the same as this candidate."""
        contenders = self._beside(candidate)
        return speed_of(contenders[0]) if contenders else None

    def _beside(self, candidate: Candidate) -> list[Trial]:
        number = self._ground.tier_number.get(candidate.id)
        return [] if number is None else self.contenders(self.tiers[number])

    def ahead(self, trials: Sequence[Trial], leader: int) -> tuple[Numbers, Numbers]:
        """By how much each of these is believed to be faster than the leader, in logarithms, and how far that may be off."""
        places = self._ground.table.places(trial.candidate for trial in trials)
        ahead, doubt = self.beliefs.speed.ahead_of(leader)
        return ahead[places], doubt[places]

    def usual_seconds(self, *, load: bool) -> float:
        """What a further probe is likely to take, from what the others took; 0 while nothing was measured."""
        if not self.probes:
            return 0.0
        costs = [trial.measurement.cost for trial in self.probes]
        probing = statistics.median(cost.total_seconds - cost.load_seconds for cost in costs)
        return probing + (max(cost.load_seconds for cost in costs) if load else 0.0)

    def cycle_spread(self) -> float | None:
        """How much single cycles scatter within the probes so far; None while that is not known."""
        return usual_scatter(self.told)

    def _number(self, tier: Tier) -> int:
        return next(number for number, one in enumerate(self.tiers) if one is tier)

    def _those(self, tier: Tier, flags: Flags) -> Places:
        places = self._ground.places[self._number(tier)]
        return places[flags[places]]

    def _ids(self, flags: Flags) -> frozenset[str]:
        return frozenset(self._ground.table.candidates[place].id for place in np.flatnonzero(flags))
