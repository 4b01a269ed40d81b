"""Study: ask for candidates, tell measurements, all stored in Optuna's storage.

`ask` lets the agenda decide by the trials, lets the sampler choose a candidate, and claims it for
this driver. If another driver was faster, the agenda decides anew. `tell` writes the measurement,
then releases the claim.
"""

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
from autotune.search.database_retry import RetryPolicy
from autotune.search.sampler import StockSampler, distributions_of, stock_sampler
from autotune.search.storage import open_optuna, open_storage, sweep_stale
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
    phases = prediction.seconds_by_phase
    phases_at_lengths = prediction.seconds_at_lengths or {}
    rate = prediction.tokens_per_second
    rate_at_lengths = prediction.tokens_per_second_at_lengths
    return replace(
        measurement,
        worst=_predicted_cycle(timed, rate, phases),
        typical=_predicted_cycle(timed, rate_at_lengths, phases_at_lengths),
    )


def _predicted_cycle(
    timed: Speed,
    rate: Estimate | None,
    phases: Mapping[Phase, Estimate],
) -> Speed | None:
    """Return one cycle with the timed tokens at this rate, divided like the predicted phases."""
    if rate is None or rate.value <= 0:
        return None
    tokens = timed.cycle_loss_tokens[-1]
    seconds = tokens / rate.value
    predicted_seconds = sum(phase.value for phase in phases.values())
    phase_seconds: dict[str, float] = {}
    if predicted_seconds:
        for name, phase in phases.items():
            phase_seconds[name] = seconds * phase.value / predicted_seconds
    else:
        phase_seconds["other"] = seconds
    return Speed(
        completion_tokens=timed.completion_tokens,
        cycle_seconds=(seconds,),
        cycle_loss_tokens=(tokens,),
        prompt_tokens=timed.prompt_tokens,
        phase_seconds=phase_seconds,
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
        self._writer = writer
        self._study = writer.study
        self._distributions = distributions
        self._sampler = sampler
        self._predictions = predictions
        self._claims = claims
        self._claimed_by_others: frozenset[str] = frozenset()
        self.retry = retry
        self.problem = problem
        self.open: dict[int, TrialRequest] = {}
        """Requests that are not reported yet, by number."""
        self.trials = trial_storage.trials_of(self._study)
        self._screened = trial_storage.screened_ids(self._study)
        self._view: TrialView | None = None

    @property
    def view(self) -> TrialView:
        pending = self.pending
        view = self._view
        is_current = view is not None and view.pending == pending
        if view is None or not is_current or len(view.all) != len(self.trials):
            view = TrialView(self.problem, self.trials, pending)
            self._view = view
        return view

    @property
    def pending(self) -> frozenset[str]:
        """Ids of the candidates under measurement, by any driver of the study."""
        requests = self.open.values()
        requested = frozenset(request.candidate.id for request in requests)
        return requested | self._claimed_by_others

    # 1. Ask.

    def ask(self, budget: RemainingBudget) -> TrialRequest | Wait | SearchEnd:
        """Return the next candidate to measure, or the reason that there is none. Earlier
        requests may be pending.
        """
        requests = self.open.values()
        if any(request.purpose == "confirm" for request in requests):
            return Wait()
        while True:
            self.catch_up()
            self._record_screened()
            probes = budget.probes - len(self.pending)
            remaining = replace(budget, probes=probes)
            step = next_step(self.view, remaining)
            if not isinstance(step, NextProbe):
                return step
            request = self._request(step, budget.live)
            if request is not None:
                return request

    def _request(self, step: NextProbe, live: frozenset[str]) -> TrialRequest | None:
        """Begin a trial and claim its candidate; None if another driver claimed it first, or
        reported a trial meanwhile.
        """
        trial, candidate = self._begin(step.purpose, step.pool, live)
        claim = candidate.id
        if step.purpose == "confirm":
            claim += f" confirm {self.view.confirmation_count(candidate)}"
        is_claimed = self._claims is None or self._claims.take(claim)
        if is_claimed and not self.catch_up():
            request = TrialRequest(
                number=trial.number,
                purpose=step.purpose,
                candidate=candidate,
                frozen=trial,
                claim=claim,
            )
            self.open[request.number] = request
            return request
        if is_claimed:
            self._release(claim)
        end = trial_storage.failed_end("another driver of this study was faster")
        self._writer.end(trial, end)
        return None

    def _begin(
        self,
        purpose: Purpose,
        pool: IndexArray,
        live: frozenset[str] = frozenset(),
    ) -> tuple[FrozenTrial, Candidate]:
        """Begin a trial of one candidate of the pool."""
        driver = None if self._claims is None else self._claims.driver
        trial = self._writer.begin(driver)
        if len(pool) == 1:
            row = int(pool[0])
        elif self._sampler is None:
            row = most_valuable(self.view, pool, live)
        else:
            row = self._sampler.choose(self._study, trial, pool)
        candidates = self.problem.surrogate.table.candidates
        candidate = candidates[row]
        # Written before the measurement, so that a killed driver's trial names its candidate.
        start = trial_storage.trial_start(candidate, purpose, self._distributions)
        self._writer.enter(trial, start)
        return trial, candidate

    def _record_screened(self) -> None:
        """Record the screened candidates nearest to the limit; a sampler learns from them as
        from one that does not fit.
        """
        if len(self._screened) >= trial_storage.MAX_SCREENED_RECORDS:
            return
        screened = self.view.screened
        row_by_id = self.view.table.row_by_id
        predicted = [name for name in screened if name in self._predictions]

        def order(name: str) -> tuple[float, int]:
            """Nearest first; equal ones by row, since the order of a set differs by process."""
            peak = self._predictions[name].peak_memory_bytes
            return peak.low, row_by_id[name]

        lowest_first = sorted(predicted, key=order)
        recorded = lowest_first[: trial_storage.MAX_SCREENED_RECORDS]
        new = [name for name in recorded if name not in self._screened]
        if new:
            self._study.set_user_attr(trial_storage.ALL_SCREENED, len(screened))
        for name in new:
            row = np.array([row_by_id[name]])
            trial, candidate = self._begin("search", row)
            end = trial_storage.screened_end(candidate, self._predictions[name])
            self._writer.end(trial, end)
            self._screened.add(name)

    # 2. Tell.

    def tell(self, request: TrialRequest, measurement: Measurement) -> Trial:
        """Record the measurement and its verdict."""
        prediction = self._predictions.get(request.candidate.id)
        if measurement.emulated:
            measurement = with_predicted_speed(measurement, prediction)
        trial = Trial(
            number=request.number,
            purpose=request.purpose,
            candidate=request.candidate,
            measurement=measurement,
            verdict=judge(measurement),
            expected=_expected(prediction),
        )
        del self.open[request.number]
        end = trial_storage.measured_end(trial)
        try:
            self._writer.end(request.frozen, end)
        except UpdateFinishedTrialError:
            # After a long silence another driver swept this trial. The measurement counts all the
            # same.
            pool = self.view.table.rows_of([request.candidate])
            again, _ = self._begin(request.purpose, pool)
            trial = replace(trial, number=again.number)
            end = trial_storage.measured_end(trial)
            self._writer.end(again, end)
        self._release(request.claim)  # only after the trial is visible to other drivers
        self.trials = (*self.trials, trial)
        return trial

    def tell_fault(self, request: TrialRequest, reason: str) -> None:
        """Record a fault of the machine; the candidate stays open."""
        del self.open[request.number]
        with suppress(UpdateFinishedTrialError):  # swept by another driver
            end = trial_storage.failed_end(reason)
            self._writer.end(request.frozen, end)
        self._release(request.claim)

    # 3. Other drivers.

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
        claims = self._claims.others()
        self._claimed_by_others = frozenset(claim.split()[0] for claim in claims)
        if released:
            sweep_stale(self._writer, self._claims, self.open)

        numbers = {trial.number for trial in self.trials}
        new = []
        for frozen in self._study.get_trials(deepcopy=False):
            is_new = frozen.number not in numbers
            if frozen.state.is_finished() and is_new:
                trial = trial_storage.read_trial(frozen)
                if trial is not None:
                    new.append(trial)
        self.trials = (*self.trials, *new)
        return bool(new)

    def leave(self) -> None:
        """Release all claims; repeated calls are allowed."""
        if self._claims is not None:
            self._claims.leave()

    def _release(self, claim: str) -> None:
        if self._claims is not None:
            self._claims.release(claim)


def _expected(prediction: Prediction | None) -> Expected | None:
    if prediction is None:
        return None
    return Expected(
        peak_memory_bytes=prediction.peak_memory_bytes,
        tokens_per_second=prediction.tokens_per_second,
    )


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
    # 1. The storage, without trials that a terminated driver left running.
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

    # 2. The search problem.
    members = [*candidates, baseline] if baseline else candidates
    table = CandidateTable(job.space, members)
    surrogate = SurrogateModel(
        table,
        predictions,
        limit_bytes=job.memory_limit_bytes,
        options=options,
    )
    foreign_trials = _of_other_studies(earlier, trial_storage.trials_of(study))
    problem = SearchProblem(
        tiers=tiers_of(job.space, candidates),
        surrogate=surrogate,
        baseline=baseline,
        uses_surrogate=job.sampler == "value",
        predicted_rates=_rates_of(job, predictions),
        earlier=foreign_trials,
    )

    # 3. The sampler.
    distributions = distributions_of(job.space, baseline)
    seed = job.task.workload.seed
    sampler = stock_sampler(job.sampler, distributions, table.candidates, seed)
    return Study(writer, problem, distributions, sampler, predictions, claims, retry)


def _rates_of(job: Job, predictions: Mapping[str, Prediction]) -> dict[str, float]:
    """Return the predicted speeds by candidate id; none where speed is measured."""
    rates: dict[str, float] = {}
    if not job.task.hardware.emulated:
        return rates
    for candidate_id, prediction in predictions.items():
        if prediction.ranking_rate is not None:
            rates[candidate_id] = prediction.ranking_rate.value
    return rates


def _of_other_studies(earlier: Sequence[Trial], recorded: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the earlier trials that are not this study's: a resumed study's trials are in the
    user's store as well.
    """
    recorded_keys = {(trial.candidate.id, trial.measurement.cost) for trial in recorded}
    unrecorded = []
    for trial in earlier:
        key = (trial.candidate.id, trial.measurement.cost)
        if key not in recorded_keys:
            unrecorded.append(trial)
    return tuple(unrecorded)
