"""Ask and tell: candidates out, measurements in, all of it kept in Optuna's storage.

How an outcome is told follows from what Optuna's samplers make of it: what fits is COMPLETE with its
speed; what ran out of memory, or over the limit, is PRUNED with its constraint violated, which TPE
learns from; FAIL is for faults that say nothing about the candidate, and no sampler sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import optuna
from optuna.trial import TrialState

from autotune.candidate import Candidate
from autotune.measurement import Measurement, Outcome
from autotune.prediction import Prediction
from autotune.question import Question
from autotune.recommendation import Purpose, Trial
from autotune.study import records
from autotune.study import screened as screening
from autotune.study.agenda import Agenda, Means, Stop
from autotune.study.preference import tiers_of
from autotune.study.sampler import PoolSampler, distributions_of, make_sampler, suggest
from autotune.study.storage import open_optuna, open_storage, sweep_stale
from autotune.study.view import View
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

    def __init__(self, study: optuna.Study, sampler: PoolSampler, agenda: Agenda) -> None:
        self._study = study
        self._sampler = sampler
        self._distributions = distributions_of(agenda.space, agenda.baseline)
        self._open: dict[int, optuna.Trial] = {}
        self.agenda = agenda
        self.trials: tuple[Trial, ...] = tuple(
            trial for frozen in study.get_trials(deepcopy=False) if (trial := records.read_trial(frozen)) is not None
        )

    @property
    def name(self) -> str:
        return self._study.study_name

    @property
    def size(self) -> int:
        """How many legal candidates there are."""
        return sum(len(tier.candidates) for tier in self.agenda.tiers)

    @property
    def view(self) -> View:
        return self.agenda.view(self.trials)

    def ask(self, means: Means) -> Asked | Stop:
        """The next candidate to measure, or why there is none."""
        step = self.agenda.next(self.trials, means)
        if isinstance(step, Stop):
            return step
        trial, candidate = self._begin(step.pool, step.purpose)
        self._open[trial.number] = trial
        return Asked(number=trial.number, purpose=step.purpose, candidate=candidate)

    def _begin(self, pool: Sequence[Candidate], purpose: Purpose) -> tuple[optuna.Trial, Candidate]:
        self._sampler.pool = pool
        trial = self._study.ask()
        candidate = self._sampler.settle(trial)
        for name in candidate.knobs:
            suggest(trial, name, self._distributions[name])
        for key, value in records.candidate_attributes(candidate, purpose).items():
            trial.set_user_attr(key, value)
        return trial, candidate

    def tell_screened(self, candidate: Candidate, prediction: Prediction) -> None:
        """On record as ruled out by prediction; the sampler learns from it as from something that does not fit."""
        trial, _ = self._begin((candidate,), "search")
        trial.set_user_attr("candidate_id", candidate.id)
        trial.set_user_attr(screening.PREDICTED, screening.figures(prediction))
        trial.set_user_attr(records.OUTCOME, str(Outcome.SCREENED))
        trial.set_user_attr(records.WHY, screening.why(prediction))
        trial.set_constraint(_CONSTRAINT, screening.violation(prediction))
        self._study.tell(trial, state=TrialState.PRUNED)

    def tell(self, asked: Asked, measurement: Measurement) -> Trial:
        """Record the measurement and what it means."""
        told = Trial(
            number=asked.number,
            purpose=asked.purpose,
            candidate=asked.candidate,
            measurement=measurement,
            verdict=judge(measurement),
        )
        self._write(told)
        self.trials = (*self.trials, told)
        return told

    def tell_fault(self, asked: Asked, reason: str) -> None:
        """The machine failed, not the candidate: it stays open."""
        trial = self._open.pop(asked.number)
        trial.set_user_attr(records.WHY, reason)
        self._study.tell(trial, state=TrialState.FAIL)

    def _write(self, told: Trial) -> None:
        trial = self._open.pop(told.number)
        trial.set_user_attr(records.MEASUREMENT, records.plain(told.measurement))
        trial.set_user_attr(records.OUTCOME, str(told.measurement.outcome))
        trial.set_user_attr(records.WHY, told.verdict.why)
        if told.measurement.outcome is Outcome.INTERRUPTED:
            self._study.tell(trial, state=TrialState.FAIL)
            return
        trial.set_constraint(_CONSTRAINT, _violation(told))
        speed = told.measurement.ranking_speed
        if told.verdict.fits and speed is not None:
            self._study.tell(trial, speed.tokens_per_second)
        else:
            self._study.tell(trial, state=TrialState.PRUNED)


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
    candidates: tuple[Candidate, ...],
    baseline: Candidate | None,
    screened: Mapping[str, Prediction] = MappingProxyType({}),
) -> Study:
    """The study of this question, new or resumed, over its legal candidates; those `screened` cannot fit, by prediction."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = open_optuna(question, open_storage(question.storage))
    sweep_stale(study)
    sampler = make_sampler(question.sampler, distributions_of(question.space, baseline), question.job.workload.seed)
    study.sampler = sampler
    agenda = Agenda(
        space=question.space, tiers=tiers_of(question.space, candidates), baseline=baseline, screened=frozenset(screened)
    )
    opened = Study(study, sampler, agenda)
    by_id = {candidate.id: candidate for candidate in candidates}
    for name in screening.to_record(study, screened):
        if name in by_id:
            opened.tell_screened(by_id[name], screened[name])
    return opened
