"""Study: ask for candidates, tell measurements, all stored in Optuna's storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial

from autotune.core.answer import Expected, Purpose, Trial
from autotune.core.job import Job
from autotune.core.measurement import Measurement, Phase, Speed, judge
from autotune.core.prediction import Estimate, Prediction
from autotune.core.space import Candidate
from autotune.search import trial_storage
from autotune.search.acquisition import most_valuable
from autotune.search.agenda import NextProbe, RemainingBudget, SearchEnd, Wait, next_step
from autotune.search.claims import Claims
from autotune.search.sampler import StockSampler, distributions_of, stock_sampler
from autotune.search.storage import RetryPolicy, open_optuna, open_storage, sweep_stale
from autotune.search.surrogate.candidate_table import CandidateTable, IndexArray
from autotune.search.surrogate.estimates import SearchOptions, SurrogateModel
from autotune.search.trial_storage import AtomicRDBStorage, TrialWriter
from autotune.search.trial_view import SearchProblem, TrialView, tiers_of


def with_predicted_speed(measurement: Measurement, prediction: Prediction | None) -> Measurement:
    """Return the measurement with cycles at the predicted speed, for the longest and the usual
    lengths, where it is predicted.
    """
    timed = measurement.worst
    if timed is None or prediction is None:
        return replace(measurement, worst=None, typical=None)
    phases = {phase.name: phase.seconds for phase in prediction.phases if phase.seconds is not None}
    return replace(
        measurement,
        worst=_predicted_cycle(timed, prediction.tokens_per_second, phases),
        typical=_predicted_cycle(
            timed, prediction.tokens_per_second_at_lengths, prediction.seconds_at_lengths or {}
        ),
    )


def _predicted_cycle(
    timed: Speed, rate: Estimate | None, phases: Mapping[Phase, Estimate]
) -> Speed | None:
    if rate is None or rate.value <= 0:
        return None
    tokens = timed.cycle_loss_tokens[-1]
    seconds = tokens / rate.value
    whole = sum(phase.value for phase in phases.values())
    return Speed(
        completion_tokens=timed.completion_tokens,
        cycle_seconds=(seconds,),
        cycle_loss_tokens=(tokens,),
        prompt_tokens=timed.prompt_tokens,
        phase_seconds=(
            {name: seconds * phase.value / whole for name, phase in phases.items()}
            if whole
            else {"other": seconds}
        ),
    )


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """Candidate to measure."""

    number: int
    purpose: Purpose
    candidate: Candidate
    frozen: FrozenTrial  # Its trial in the storage
    claim: str


class Study:
    def __init__(
        self,
        writer: TrialWriter,
        problem: SearchProblem,
        distributions: Mapping[str, BaseDistribution],
        sampler: StockSampler | None,
        predictions: Mapping[str, Prediction],
        claims: Claims | None,
        retry: RetryPolicy,
    ) -> None:
        self._writer, self._study = writer, writer.study
        self._distributions, self._sampler, self._predictions = distributions, sampler, predictions
        self._claims, self._claimed_by_others = claims, frozenset[str]()
        self.retry, self.problem = retry, problem
        self.open: dict[int, TrialRequest] = {}
        """Requests that are not reported yet, by number."""
        self.trials = trial_storage.trials_of(self._study)
        self._screened = trial_storage.screened_ids(self._study)
        self._view: TrialView | None = None

    @property
    def view(self) -> TrialView:
        pending = self.pending
        if (
            self._view is None
            or len(self._view.all) != len(self.trials)
            or self._view.pending != pending
        ):
            self._view = TrialView(self.problem, self.trials, pending)
        return self._view

    @property
    def pending(self) -> frozenset[str]:
        """Ids of the candidates under measurement, by any driver of the study."""
        return frozenset(one.candidate.id for one in self.open.values()) | self._claimed_by_others

    def ask(self, budget: RemainingBudget) -> TrialRequest | Wait | SearchEnd:
        """Return the next candidate to measure, or the reason that there is none. Earlier
        requests may be pending.
        """
        if any(one.purpose == "confirm" for one in self.open.values()):
            return Wait()
        while True:
            self.catch_up()
            self._record_screened()
            step = next_step(self.view, replace(budget, probes=budget.probes - len(self.pending)))
            if not isinstance(step, NextProbe):
                return step
            trial, candidate = self._begin(step.purpose, step.pool, budget.live)
            round_number = (
                f" confirm {len(self.view.rounds.get(candidate.id, ()))}"
                if step.purpose == "confirm"
                else ""
            )
            claim = f"{candidate.id}{round_number}"
            taken = self._claims is None or self._claims.take(claim)
            if taken and not self.catch_up():
                number, purpose = trial.number, step.purpose
                request = TrialRequest(
                    number=number, purpose=purpose, candidate=candidate, frozen=trial, claim=claim
                )
                self.open[number] = request
                return request
            if taken:
                self._release(claim)
            # Another driver claimed the candidate first or reported a trial: the agenda decides
            # anew.
            self._writer.end(
                trial, trial_storage.failed_end("another driver of this study was faster")
            )

    def catch_up(self) -> bool:
        """Read the trials of other drivers and update the heartbeat; return True for new trials.
        Call every few seconds.
        """
        if self._claims is None:
            return False
        self._claims.beat()
        if not self._claims.shared:
            return False
        released = self._claims.release_stale()
        self._claimed_by_others = frozenset(what.split()[0] for what in self._claims.others())
        if released:
            sweep_stale(self._writer, self._claims, self.open)
        known = {trial.number for trial in self.trials}
        finished = (
            one
            for one in self._study.get_trials(deepcopy=False)
            if one.number not in known and one.state.is_finished()
        )
        new = [
            trial for frozen in finished if (trial := trial_storage.read_trial(frozen)) is not None
        ]
        self.trials = (*self.trials, *new)
        return bool(new)

    def leave(self) -> None:
        """Release all claims; repeated calls are allowed."""
        if self._claims is not None:
            self._claims.leave()

    def _release(self, claim: str) -> None:
        if self._claims is not None:
            self._claims.release(claim)

    def _begin(
        self, purpose: Purpose, pool: IndexArray, live: frozenset[str] = frozenset()
    ) -> tuple[FrozenTrial, Candidate]:
        trial = self._writer.begin(None if self._claims is None else self._claims.driver)
        if len(pool) == 1:
            row = pool[0]
        elif self._sampler is None:
            row = most_valuable(self.view, pool, live)
        else:
            row = self._sampler.choose(self._study, trial, pool)
        candidate = self.problem.surrogate.table.candidates[row]
        # Written before the measurement, so that a killed driver's trial names its candidate.
        self._writer.enter(
            trial, trial_storage.trial_start(candidate, purpose, self._distributions)
        )
        return trial, candidate

    def _record_screened(self) -> None:
        """Record the screened candidates nearest to the limit; a sampler learns from them as
        from one that does not fit.
        """
        if len(self._screened) >= trial_storage.MAX_SCREENED_RECORDS:
            return
        screened, table = self.view.screened, self.view.table
        predicted = [name for name in screened if name in self._predictions]
        nearest = sorted(predicted, key=lambda name: self._predictions[name].peak_memory_bytes.low)
        new = [
            name
            for name in nearest[: trial_storage.MAX_SCREENED_RECORDS]
            if name not in self._screened
        ]
        if new:
            self._study.set_user_attr(trial_storage.ALL_SCREENED, len(screened))
        for name in new:
            trial, candidate = self._begin("search", np.array([table.row_by_id[name]]))
            self._writer.end(trial, trial_storage.screened_end(candidate, self._predictions[name]))
            self._screened.add(name)

    def tell(self, request: TrialRequest, measurement: Measurement) -> Trial:
        """Record the measurement and its verdict."""
        predicted, expected = self._predictions.get(request.candidate.id), None
        if predicted is not None:
            expected = Expected(
                peak_memory_bytes=predicted.peak_memory_bytes,
                tokens_per_second=predicted.tokens_per_second,
            )
        if measurement.emulated:
            measurement = with_predicted_speed(measurement, predicted)
        trial = Trial(
            number=request.number,
            purpose=request.purpose,
            candidate=request.candidate,
            measurement=measurement,
            verdict=judge(measurement),
            expected=expected,
        )
        del self.open[request.number]
        try:
            self._writer.end(request.frozen, trial_storage.measured_end(trial))
        except UpdateFinishedTrialError:
            # After a long silence another driver swept this trial. The measurement counts all the
            # same.
            again, _ = self._begin(request.purpose, self.view.table.rows_of([request.candidate]))
            trial = replace(trial, number=again.number)
            self._writer.end(again, trial_storage.measured_end(trial))
        self._release(request.claim)  # only after the trial is visible to other drivers
        self.trials = (*self.trials, trial)
        return trial

    def tell_fault(self, request: TrialRequest, reason: str) -> None:
        """Record a fault of the machine; the candidate stays open."""
        del self.open[request.number]
        with suppress(UpdateFinishedTrialError):  # swept by another driver
            self._writer.end(request.frozen, trial_storage.failed_end(reason))
        self._release(request.claim)


def open_study(
    job: Job,
    candidates: Sequence[Candidate],
    baseline: Candidate | None,
    predictions: Mapping[str, Prediction] = MappingProxyType({}),
    *,
    options: SearchOptions = SearchOptions(),  # noqa: B008
    earlier: Sequence[Trial] = (),
) -> Study:
    """Return the job's study, new or resumed. `predictions` by candidate id are the surrogate's
    priors. `earlier` are trials of other studies on the same model, versions and hardware: evidence
    for the surrogate, not counted as measured here.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    retry = RetryPolicy(url=job.storage)
    storage = open_storage(job.storage, retry)
    study = open_optuna(job, storage)
    claims: Claims | None = None  # in this process's own memory there are no other drivers
    if isinstance(storage, AtomicRDBStorage):
        claims = Claims(storage.engine, job.study_name, retry=retry)
        claims.release_stale()
    writer = TrialWriter(study=study, storage=storage)
    sweep_stale(writer, claims)
    table = CandidateTable(job.space, [*candidates, *([baseline] if baseline else [])])
    distributions = distributions_of(job.space, baseline)
    # A resumed study's own trials are in the user's store as well.
    own = {(one.candidate.id, one.measurement.cost) for one in trial_storage.trials_of(study)}
    problem = SearchProblem(
        tiers=tiers_of(job.space, candidates),
        surrogate=SurrogateModel(
            table, predictions, limit_bytes=job.memory_limit_bytes, options=options
        ),
        baseline=baseline,
        uses_surrogate=job.sampler == "value",
        earlier=tuple(
            one for one in earlier if (one.candidate.id, one.measurement.cost) not in own
        ),
    )
    sampler = stock_sampler(job.sampler, distributions, table.candidates, job.task.workload.seed)
    return Study(writer, problem, distributions, sampler, predictions, claims, retry)
