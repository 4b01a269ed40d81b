"""The trials so far, asked the questions that the agenda asks of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from autotune.candidate import Candidate
from autotune.measurement import Outcome
from autotune.recommendation import Trial
from autotune.space import SearchSpace
from autotune.study.implied import implied_by
from autotune.study.pool import pooled
from autotune.study.preference import Tier


def speed_of(trial: Trial) -> float:
    """The speed a trial is ranked by; below everything where there is none."""
    speed = trial.measurement.ranking_speed
    return speed.tokens_per_second if speed else float("-inf")


class View:
    """What is known, derived anew from the recorded trials each time, so that a resumed study knows the same."""

    def __init__(
        self, space: SearchSpace, tiers: Sequence[Tier], trials: Sequence[Trial], screened: frozenset[str] = frozenset()
    ) -> None:
        telling = [trial for trial in trials if trial.measurement.outcome is not Outcome.INTERRUPTED]
        self.tiers = tiers
        self.all = tuple(trials)
        self.probes = [trial for trial in telling if trial.purpose != "confirm"]
        self.rounds: dict[str, list[Trial]] = {}
        for trial in telling:
            if trial.purpose == "confirm":
                self.rounds.setdefault(trial.candidate.id, []).append(trial)
        self.confirmations = {candidate_id: pooled(trials) for candidate_id, trials in self.rounds.items()}
        self.measured: Mapping[str, Trial] = {trial.candidate.id: trial for trial in self.probes}
        candidates = [candidate for tier in tiers for candidate in tier.candidates]
        self.implied = implied_by(space, telling, candidates) - set(self.measured)
        self.screened = screened - set(self.measured)

    def is_open(self, candidate: Candidate) -> bool:
        return not any(candidate.id in settled for settled in (self.measured, self.implied, self.screened))

    def open_in(self, tier: Tier) -> list[Candidate]:
        return [candidate for candidate in tier.candidates if self.is_open(candidate)]

    def probed_in(self, tier: Tier) -> list[Trial]:
        """The tier's trials in the order in which they were measured."""
        ids = {candidate.id for candidate in tier.candidates}
        return [trial for trial in self.probes if trial.candidate.id in ids]

    def contenders(self, tier: Tier) -> list[Trial]:
        """What fits in the tier and was not refuted by a confirmation, fastest first."""
        fitting = [trial for trial in self.probed_in(tier) if trial.verdict.fits and not self._refuted(trial)]
        return sorted(fitting, key=speed_of, reverse=True)

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

    def fastest_beside(self, candidate: Candidate) -> float | None:
        """The best speed among those that fit and learn the same as this candidate."""
        tier = next((tier for tier in self.tiers if candidate in tier.candidates), None)
        contenders = self.contenders(tier) if tier else []
        return speed_of(contenders[0]) if contenders else None

    def usual_seconds(self, *, load: bool) -> float:
        """What a further probe is likely to take, from what the others took; 0 while nothing was measured."""
        if not self.probes:
            return 0.0
        costs = [trial.measurement.cost for trial in self.probes]
        probing = statistics.median(cost.total_seconds - cost.load_seconds for cost in costs)
        return probing + (max(cost.load_seconds for cost in costs) if load else 0.0)

    def _refuted(self, trial: Trial) -> bool:
        confirmation = self.confirmations.get(trial.candidate.id)
        return confirmation is not None and not confirmation.verdict.fits
