"""Study of a job: Optuna's ask and tell with `PredictedSampler`, for a loop with several slots.

`Study.optimize` of Optuna does the same with a thread per slot (`objective`). The loop's own needs:
a budget in seconds, slots that are lost, confirmations that run alone, and other drivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import RDBStorage
from optuna.trial import TrialState

from autotune.core.answer import Purpose, Trial
from autotune.core.job import Job
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.search import trial_storage
from autotune.search.agenda import NextProbe, RemainingBudget, SearchEnd, Wait
from autotune.search.claims import Claims
from autotune.search.database_retry import RetryPolicy
from autotune.search.measured_trial import measured_trial
from autotune.search.problem import search_problem
from autotune.search.sampler import NothingToMeasure, PredictedSampler
from autotune.search.storage import check_parameters, open_optuna, open_storage, sweep_stale
from autotune.search.surrogate.estimates import SearchOptions
from autotune.search.trial_storage import TrialEnd
from autotune.search.trial_view import TrialView


@dataclass(frozen=True, kw_only=True)
class TrialRequest:
    """Candidate to measure."""

    number: int
    purpose: Purpose
    candidate: Candidate
    trial: optuna.Trial
    claim: str


class Study:
    """Study of Optuna with the sampler of one job, asked and told by one thread."""

    def __init__(
        self,
        study: optuna.Study,
        sampler: PredictedSampler,
        retry: RetryPolicy,
    ) -> None:
        self._study = study
        self._sampler = sampler
        self._claims = sampler.claims
        self.retry = retry
        self.problem = sampler.problem
        self.open: dict[int, TrialRequest] = {}
        """Requests that are not reported yet, by number."""
        self._screened = trial_storage.screened_ids(study)
        self._read()

    @property
    def trials(self) -> tuple[Trial, ...]:
        return self._sampler.trials

    @property
    def view(self) -> TrialView:
        """State of the study, as read last."""
        return self._view

    def _read(self) -> None:
        self._view = self._sampler.view(self._study)

    # 1. Ask.

    def ask(self, budget: RemainingBudget) -> TrialRequest | Wait | SearchEnd:
        """Return the next candidate to measure, or the reason that there is none. Earlier
        requests may be pending.
        """
        requests = self.open.values()
        if any(request.purpose == "confirm" for request in requests):
            return Wait()
        self._sampler.budget = lambda: budget
        self._keep_claims()
        self._read()
        step = self._sampler.step_by(self.view)
        if not isinstance(step, NextProbe):
            return step
        self._record_screened()
        trial = self._study.ask()
        try:
            candidate = self._sampler.suggest(trial)
        except NothingToMeasure as error:  # Another driver was faster
            self._fail(trial, str(error))
            return error.step
        purpose = trial.user_attrs.get(trial_storage.PURPOSE, "search")
        request = TrialRequest(
            number=trial.number,
            purpose=purpose,
            candidate=candidate,
            trial=trial,
            claim=self._sampler.claim_of(purpose, candidate),
        )
        self.open[request.number] = request
        return request

    def _record_screened(self) -> None:
        """Record the screened candidates nearest to the limit; a sampler learns from them as
        from one that does not fit.
        """
        if len(self._screened) >= trial_storage.MAX_SCREENED_RECORDS:
            return
        view = self.view
        screened = view.screened
        predictions = self.problem.predictions
        predicted = [name for name in screened if name in predictions]

        def order(name: str) -> tuple[float, int]:
            """Nearest first; equal ones by row, since the order of a set differs by process."""
            return predictions[name].peak_memory_bytes.low, view.table.row_by_id[name]

        lowest_first = sorted(predicted, key=order)
        recorded = lowest_first[: trial_storage.MAX_SCREENED_RECORDS]
        new = [name for name in recorded if name not in self._screened]
        if new:
            self._study.set_user_attr(trial_storage.ALL_SCREENED, len(screened))
        for name in new:
            candidate = view.table.candidates[view.table.row_by_id[name]]
            end = trial_storage.screened_end(candidate, predictions[name])
            self._add_ended(candidate, "search", end)
            self._screened.add(name)

    def _add_ended(
        self,
        candidate: Candidate,
        purpose: Purpose,
        end: TrialEnd,
    ) -> None:
        start = self._sampler.start_attributes(candidate, purpose)
        parameters = self._sampler.parameters
        trial_storage.add_ended(self._study, parameters, candidate, end, start)

    # 2. Tell.

    def tell(self, request: TrialRequest, measurement: Measurement) -> Trial:
        """Record the measurement and its verdict."""
        trial = measured_trial(
            request.number,
            request.purpose,
            request.candidate,
            measurement,
            self.problem.predictions.get(request.candidate.id),
        )
        del self.open[request.number]
        end = trial_storage.measured_end(trial)
        try:
            trial_storage.write_end(request.trial, end)
            self._study.tell(request.trial, end.value, state=end.state)
        except (UpdateFinishedTrialError, ValueError):
            # After a long silence another driver swept this trial. The measurement counts all the
            # same. If only the reply to an earlier try was lost, it is on record.
            if not self._has_measurement(request):
                self._add_ended(request.candidate, request.purpose, end)
        self._release(request.claim)  # only after the trial is visible to other drivers
        self._read()
        measured = [trial for trial in self.trials if trial.candidate == request.candidate]
        return measured[-1]

    def _has_measurement(self, request: TrialRequest) -> bool:
        for frozen in self._study.get_trials(deepcopy=False):
            if frozen.number == request.number:
                return trial_storage.MEASUREMENT in frozen.user_attrs
        return False

    def tell_fault(self, request: TrialRequest, reason: str) -> None:
        """Record a fault of the machine; the candidate stays open."""
        del self.open[request.number]
        self._fail(request.trial, reason)
        self._release(request.claim)

    def _fail(self, trial: optuna.Trial, reason: str) -> None:
        with suppress(UpdateFinishedTrialError, ValueError):  # swept by another driver
            trial_storage.write_end(trial, trial_storage.failed_end(reason))
            self._study.tell(trial, state=TrialState.FAIL)
        self._read()

    # 3. Other drivers.

    def catch_up(self) -> bool:
        """Read the trials of other drivers and update the heartbeat; return True for new trials.
        Call every few seconds.
        """
        self._keep_claims()
        count = len(self.trials)
        self._read()
        return len(self.trials) > count

    def _keep_claims(self) -> None:
        if self._claims is None:
            return
        self._claims.beat()
        if self._claims.shared and self._claims.release_stale():
            sweep_stale(self._study, self._claims, self.open)

    def leave(self) -> None:
        """Release all claims; repeated calls are allowed."""
        if self._claims is not None:
            self._claims.leave()

    def _release(self, claim: str) -> None:
        if self._claims is not None:
            self._claims.release(claim)


def open_study(
    job: Job,
    candidates: Sequence[Candidate],
    baseline: Candidate | None,
    predictions: Mapping[str, Prediction] = MappingProxyType({}),
    *,
    options: SearchOptions = SearchOptions(),  # noqa: B008
    earlier: Sequence[Trial] = (),
) -> Study:
    """Return the job's study, new or resumed (`search_problem` describes the arguments)."""
    # 1. The storage, without trials that a terminated driver left running.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    retry = RetryPolicy(url=job.storage)
    storage = open_storage(job.storage, retry)
    study = open_optuna(job, storage)
    claims: Claims | None = None  # in this process's own memory there are no other drivers
    if isinstance(storage, RDBStorage):
        claims = Claims(storage.engine, job.study_name, retry=retry)
        claims.release_stale()
    sweep_stale(study, claims)

    # 2. The sampler.
    problem = search_problem(
        job,
        candidates,
        baseline,
        predictions,
        options=options,
        earlier=_of_other_studies(earlier, study),
    )
    study.sampler = PredictedSampler(job, problem, claims=claims, waits=False)
    check_parameters(study, study.sampler.parameters)
    return Study(study, study.sampler, retry)


def _of_other_studies(earlier: Sequence[Trial], study: optuna.Study) -> tuple[Trial, ...]:
    """Return the earlier trials that are not this study's: a resumed study's trials are in the
    user's store as well.
    """
    recorded_keys = set()
    for frozen in study.get_trials(deepcopy=False):
        trial = trial_storage.read_trial(frozen)
        if trial is not None:
            recorded_keys.add((trial.candidate.id, trial.measurement.cost))
    unrecorded = []
    for trial in earlier:
        key = (trial.candidate.id, trial.measurement.cost)
        if key not in recorded_keys:
            unrecorded.append(trial)
    return tuple(unrecorded)
