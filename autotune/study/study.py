"""Ask and tell: candidates out, measurements in, all of it kept in Optuna's storage.

How an outcome is told follows from what Optuna's samplers make of it: what fits is COMPLETE with its
speed; what ran out of memory, or over the limit, is PRUNED with its constraint violated, which TPE
learns from; FAIL is for faults that say nothing about the candidate, and no sampler sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState

from autotune.candidate import Candidate
from autotune.measurement import Measurement, Outcome
from autotune.prediction import Prediction
from autotune.question import Question
from autotune.recommendation import Expected, Purpose, Trial
from autotune.study import records
from autotune.study import screened as screening
from autotune.study.agenda import Agenda, Means, Step, Stop, Wait
from autotune.study.beliefs import Mind
from autotune.study.claims import Claims
from autotune.study.options import SearchOptions
from autotune.study.patience import Patience
from autotune.study.preference import tiers_of
from autotune.study.sampler import PoolSampler, ValueSampler, distributions_of, make_sampler
from autotune.study.storage import claims_on, open_optuna, open_storage, sweep_stale
from autotune.study.table import Table
from autotune.study.view import Ground, View
from autotune.study.whole import End, Entry, Trials
from autotune.study.worth import worth
from autotune.verdict import judge

_CONSTRAINT = "memory over the limit"
_NOT_MEMORY = 1.0
"""Violation told for a candidate that failed for another reason than memory: as if it needed twice the limit."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A candidate that waits for its measurement."""

    number: int
    purpose: Purpose
    candidate: Candidate


class Study:
    """One question's study."""

    def __init__(
        self,
        written: Trials,
        sampler: PoolSampler,
        agenda: Agenda,
        predictions: Mapping[str, Prediction],
        claims: Claims,
        patience: Patience,
    ) -> None:
        self._written, self._study = written, written.study
        self._sampler = sampler
        self._predictions = predictions
        self._open: dict[int, FrozenTrial] = {}
        self._asked: dict[int, Asked] = {}
        self._claims, self._claimed_by_others = claims, frozenset[str]()
        self._mine: dict[int, str] = {}
        self._patience = patience
        self.agenda = agenda
        self.trials = records.trials_of(self._study)
        self._screened = screening.recorded(self._study)
        self._seen: View | None = None

    @property
    def name(self) -> str:
        return self._study.study_name

    @property
    def size(self) -> int:
        """How many legal candidates there are."""
        return sum(len(tier.candidates) for tier in self.agenda.ground.tiers)

    @property
    def view(self) -> View:
        pending = self.pending
        if self._seen is None or len(self._seen.all) != len(self.trials) or self._seen.pending != pending:
            self._seen = self.agenda.view(self.trials, pending)
        return self._seen

    @property
    def pending(self) -> frozenset[str]:
        """Ids of the candidates that were asked and not told yet, here or by another driver of the study."""
        return frozenset(one.candidate.id for one in self._asked.values()) | self._claimed_by_others

    @property
    def options(self) -> SearchOptions:
        return self.agenda.options

    def ask(self, means: Means) -> Asked | Wait | Stop:
        """The next candidate to measure, or why there is none. May be asked again before an earlier one is told."""
        if any(one.purpose == "confirm" for one in self._asked.values()):
            return Wait()
        asked = None
        while asked is None:
            self.catch_up()
            self._record_screened()
            step = self.agenda.next(self.view, replace(means, probes=means.probes - len(self.pending)))
            if not isinstance(step, Step):
                return step
            self._prepare_sampler(step, means)
            asked = self._ask_claimed(step.purpose)
        return asked

    def _ask_claimed(self, purpose: Purpose) -> Asked | None:
        """None where another driver was faster, or told something meanwhile: then it is to be thought over again."""
        trial, candidate = self._begin(purpose)
        asked = Asked(number=trial.number, purpose=purpose, candidate=candidate)
        turn = f" confirm {len(self.view.rounds.get(candidate.id, ()))}" if purpose == "confirm" else ""
        claim = f"{candidate.id}{turn}"  # what nobody else may measure meanwhile: a candidate, or one turn of a finalist
        if self._claims.take(claim):
            if not self.catch_up():
                self._open[trial.number], self._asked[trial.number], self._mine[trial.number] = trial, asked, claim
                return asked
            self._claims.give_back(claim)
        self._give_up(trial, "another driver of this study was faster")
        return None

    def catch_up(self) -> bool:
        """Hear of what other drivers of this study did; whether any of them told something new. Says as well that this one is
        there, so it is to be called every few seconds."""
        self._claims.beat()
        if not self._claims.shared:
            return False
        buried, self._claimed_by_others = self._claims.bury(), frozenset(what.split()[0] for what in self._claims.others())
        if buried:
            sweep_stale(self._written, self._claims, self._open)
        known = {trial.number for trial in self.trials}
        finished = (one for one in self._study.get_trials(deepcopy=False) if one.number not in known and one.state.is_finished())
        new = [trial for frozen in finished if (trial := records.read_trial(frozen)) is not None]
        self.trials = (*self.trials, *new)
        return bool(new)

    def leave(self) -> None:
        """Give back what is claimed: this driver is done. May be called twice."""
        self._claims.leave()

    def when_waiting(self, say: Callable[[str], None]) -> None:
        """Who is told, in a sentence, that the database is waited for."""
        self._patience.say = say

    def _prepare_sampler(self, step: Step, means: Means) -> None:
        """Who may be chosen, and what each is worth."""
        ground, seen = self.agenda.ground, self.view
        self._sampler.pool = step.pool
        if isinstance(self._sampler, ValueSampler):
            leader = seen.leader_beside(ground.table.candidates[step.pool[0]])
            self._sampler.worth = lambda: worth(
                ground.table, seen.told, seen.beliefs, step.pool, leader, self.agenda.options, means.live
            )

    def _begin(self, purpose: Purpose) -> tuple[FrozenTrial, Candidate]:
        trial = self._written.begin({records.DRIVER: self._claims.driver} if self._claims.driver else {})
        candidate, known = self._sampler.settle(self._study, trial), self._sampler.distributions
        entry = Entry(
            params={name: value for name, value in candidate.knobs.items() if name in known},
            distributions=known,
            attributes=records.candidate_attributes(candidate, purpose),
        )
        self._written.enter(trial, entry)
        return trial, candidate

    def _begin_with(self, candidate: Candidate, purpose: Purpose) -> FrozenTrial:
        """A trial of this one and no other."""
        self._sampler.pool = self.agenda.ground.table.places([candidate])
        return self._begin(purpose)[0]

    def _record_screened(self) -> None:
        """What prediction rules out, the nearest to the limit of it; a sampler learns from it as from what does not fit."""
        if len(self._screened) >= screening.MOST_RECORDED:
            return
        ruled_out = self.view.screened
        new = [name for name in screening.nearest(list(ruled_out), self._predictions) if name not in self._screened]
        if not new:
            return
        self._study.set_user_attr(screening.ALL_SCREENED, len(ruled_out))
        for name in new:
            self._tell_screened(
                self.agenda.ground.table.candidates[self.agenda.ground.table.place[name]], self._predictions[name]
            )
            self._screened.add(name)

    def _tell_screened(self, candidate: Candidate, prediction: Prediction) -> None:
        trial = self._begin_with(candidate, "search")
        attributes = {
            screening.CANDIDATE_ID: candidate.id,
            screening.PREDICTED: screening.figures(prediction),
            records.OUTCOME: str(Outcome.SCREENED),
            records.WHY: screening.why(prediction),
        }
        violations = {_CONSTRAINT: screening.violation(prediction)}
        self._written.end(trial, End(state=TrialState.PRUNED, attributes=attributes, violations=violations))

    def tell(self, asked: Asked, measurement: Measurement) -> Trial:
        """Record the measurement and what it means."""
        told = Trial(
            number=asked.number,
            purpose=asked.purpose,
            candidate=asked.candidate,
            measurement=measurement,
            verdict=judge(measurement),
            expected=self._expected(asked.candidate),
        )
        trial = self._open.pop(asked.number)
        try:
            self._write(told, trial)
        except UpdateFinishedTrialError:
            # Not heard of for so long, this driver was taken for dead, and its trial swept. What it measured counts all the same.
            trial = self._begin_with(asked.candidate, asked.purpose)
            told = replace(told, number=trial.number)
            self._write(told, trial)
        self._asked.pop(asked.number)
        self._claims.give_back(self._mine.pop(asked.number))  # only once everybody can see what was told
        self.trials = (*self.trials, told)
        return told

    def _expected(self, candidate: Candidate) -> Expected | None:
        found = self._predictions.get(candidate.id)
        if found is None:
            return None
        return Expected(peak_memory_bytes=found.peak_memory_bytes, tokens_per_second=found.tokens_per_second)

    def tell_fault(self, asked: Asked, reason: str) -> None:
        """The machine failed, not the candidate: it stays open."""
        trial = self._open.pop(asked.number)
        self._asked.pop(asked.number)
        with suppress(UpdateFinishedTrialError):  # swept, as above
            self._give_up(trial, reason)
        self._claims.give_back(self._mine.pop(asked.number))

    def _give_up(self, trial: FrozenTrial, why: str) -> None:
        self._written.end(trial, End(state=TrialState.FAIL, attributes={records.WHY: why}))

    def _write(self, told: Trial, trial: FrozenTrial) -> None:
        attributes = {
            records.MEASUREMENT: records.plain(told.measurement),
            records.OUTCOME: str(told.measurement.outcome),
            records.WHY: told.verdict.why,
        }
        if told.expected is not None:
            attributes[records.EXPECTED] = records.plain(told.expected)
        self._written.end(trial, _end(told, attributes))


def _end(told: Trial, attributes: Mapping[str, Any]) -> End:
    if told.measurement.outcome is Outcome.INTERRUPTED:
        return End(state=TrialState.FAIL, attributes=attributes)
    violations, speed = {_CONSTRAINT: _violation(told)}, told.measurement.ranking_speed
    if told.verdict.fits and speed is not None:
        value = speed.tokens_per_second
        return End(state=TrialState.COMPLETE, attributes=attributes, violations=violations, value=value)
    return End(state=TrialState.PRUNED, attributes=attributes, violations=violations)


def _violation(told: Trial) -> float:
    """How far above the limit the need is at least, as a share of it; at most 0 for what fits."""
    memory, outcome = told.measurement.memory, told.measurement.outcome
    if outcome is not Outcome.OK and not outcome.is_out_of_memory:
        return _NOT_MEMORY
    peak = memory.peak_bytes or 0
    if outcome is Outcome.OK:
        return peak / memory.limit_bytes - 1
    asked = told.measurement.failure.numbers.get("asked_bytes", 0) if told.measurement.failure else 0
    return max((peak + asked) / memory.limit_bytes - 1, 0.01)


def open_study(
    question: Question,
    candidates: Sequence[Candidate],
    baseline: Candidate | None,
    predictions: Mapping[str, Prediction] = MappingProxyType({}),
    *,
    options: SearchOptions = SearchOptions(),  # noqa: B008 - frozen
    earlier: Sequence[Trial] = (),
) -> Study:
    """The study of this question, new or resumed, over its legal candidates.

    `predictions` by candidate id are what is believed before anything is measured; `earlier` are measurements of other
    studies on the same model, versions and hardware, which are believed too and count as nothing measured here.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    patience = Patience(url=question.storage)
    storage = open_storage(question.storage, patience)
    study = open_optuna(question, storage)
    claims, written = claims_on(storage, question.study_name, patience), Trials(study=study, storage=storage)
    sweep_stale(written, claims)
    table = Table(question.space, [*candidates, *([baseline] if baseline else [])])
    distributions = distributions_of(question.space, baseline)
    sampler = make_sampler(question.sampler, distributions, table.candidates, question.job.workload.seed)
    mind = Mind(table, predictions, limit_bytes=question.memory_limit_bytes, options=options)
    ground = Ground(table, tiers_of(question.space, candidates), mind, baseline)
    others = _of_others(earlier, records.trials_of(study))
    agenda = Agenda(ground=ground, options=options, weighs=question.sampler == "value", earlier=others)
    return Study(written, sampler, agenda, predictions, claims, patience)


def _of_others(earlier: Sequence[Trial], own: Sequence[Trial]) -> tuple[Trial, ...]:
    """What a study measured itself lies in the user's store as well: when it goes on, that counts once."""
    known = {(one.candidate.id, one.measurement.cost) for one in own}
    return tuple(one for one in earlier if (one.candidate.id, one.measurement.cost) not in known)
