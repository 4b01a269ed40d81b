"""Pipeline from a search request to its answer: stored answer, search, wider search if nothing
fits (`relaxation`), soak.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.answer import Recommendation, Trial
from autotune.core.events import BestChanged, BestPredicted, Event, Listener, Note, ProbeEnded
from autotune.core.files import sqlite_url
from autotune.core.job import Job
from autotune.core.measurement import Outcome
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.core.units import counted
from autotune.frameworks.base import Trainer
from autotune.prediction.service import open_prediction_service, predict_candidates
from autotune.probe.executors.base import Executor
from autotune.request.job_builder import ParsedRequest
from autotune.search.advice import ways_to_fit
from autotune.search.conclusion import conclude
from autotune.search.forecast_search import best_predicted
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.probe_cost import probe_cost
from autotune.search.record import Record
from autotune.search.relaxation import combined, describe_relaxation, relaxed_job, rows_left_out
from autotune.search.soak import soak
from autotune.search.study import Study, open_study

NAMED_PACKAGES = ("trl", "torch", "vllm")  # Versions to name with a stored answer
PREDICTION_SHARE = 0.5  # Largest share of the remaining budget that predictions may take


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """Recommendation, and the job that it answers: a wider one than requested if knobs were
    relaxed.
    """

    job: Job
    recommendation: Recommendation


def answer(
    request: ParsedRequest,
    candidates: Sequence[Candidate],
    executor: Executor,
    listener: Listener,
    *,
    soak_seconds: float | None = None,
) -> SearchAnswer:
    """Return the answer to a request: all of `autotune run` between its flags and its files."""
    job = request.job
    clock = Clock(job.budget_seconds)
    # 1. Check the training environment first: if it fails, no study is left behind.
    versions = executor.prepare()
    # 2. Use the stored answer to the same job.
    record = Record(job, versions)
    result = _stored_answer(request, record, listener)
    # 3. Search; if nothing fits, search again with relaxed knobs.
    if result is None:
        if record.has_unfinished_answer():
            listener(Note(text="Going on where the earlier search of this request ended."))
            job = replace(job, resume=True)
            request = replace(request, job=job)
        if job.storage == sqlite_url(job.out / "study.db"):
            job.out.mkdir(parents=True, exist_ok=True)
        searcher = _Searcher(
            trainer=request.trainer,
            executor=executor,
            listener=listener,
            clock=clock,
            versions=versions,
        )
        first = searcher.run(job, candidates)
        relaxed = searcher.relaxed(request, first)
        result = _with_ways_to_fit(relaxed, request)
        record.keep_answer(result.recommendation)
    # 4. Soak the winner.
    if soak_seconds is None or result.recommendation.interrupted:
        return result
    soaked = soak(result.job, result.recommendation, executor, listener, soak_seconds)
    return replace(result, recommendation=soaked)


def _with_ways_to_fit(result: SearchAnswer, request: ParsedRequest) -> SearchAnswer:
    """Add predicted changes that make the baseline fit, if memory lacked everywhere. On a CPU
    nothing is predicted.
    """
    recommendation = result.recommendation
    nothing_fits = recommendation.winner is None and not recommendation.interrupted
    is_predicted = request.job.task.hardware.kind == "cuda"
    counts = recommendation.counts
    if not nothing_fits or not counts.out_of_memory or not is_predicted:
        return result
    refuted = []
    for trial in recommendation.trials:
        if not trial.verdict.fits:
            refuted.append(trial.candidate.id)
    opened = open_prediction_service(request.job, request.trainer)
    with contextlib.closing(opened) as service:
        baseline = baseline_candidate(request.job, request.trainer)
        ways = ways_to_fit(request, baseline, service, refuted=refuted)
    advised = replace(recommendation, ways_to_fit=ways)
    return replace(result, recommendation=advised)


def _stored_answer(
    request: ParsedRequest,
    record: Record,
    listener: Listener,
) -> SearchAnswer | None:
    stored = record.answer()
    if stored is None or stored.from_record is None:
        return None
    source = stored.from_record
    packages = []
    for name, version in source.versions.items():
        if name in NAMED_PACKAGES:
            packages.append(f"{name} {version}")
    origin = f"{request.job.task.hardware.basis} {source.when} on {source.where}"
    with_packages = " ".join(packages)
    listener(Note(text=f"From the record: {origin} with {with_packages}. --fresh measures again."))
    job = request.job
    if stored.relaxed:
        wider = relaxed_job(job, request.whole_space, request.pinned, request.trainer)
        job = wider.job if wider else job
    return SearchAnswer(job=job, recommendation=stored)


@dataclass(frozen=True, kw_only=True)
class _Searcher:
    """Searches of one command, which share slots, budget and listener."""

    trainer: Trainer
    executor: Executor
    listener: Listener
    clock: Clock
    versions: Mapping[str, str]

    def run(
        self,
        job: Job,
        candidates: Sequence[Candidate],
        first_trials: Sequence[Trial] = (),
    ) -> Recommendation:
        """Search this job. `first_trials`: those of the first search, for a wider one."""
        # 1. Predict.
        baseline = baseline_candidate(job, self.trainer)
        predicted = [*candidates, baseline] if baseline else candidates
        predictions = self._predict(job, predicted)
        best = best_predicted(job, candidates, baseline, predictions)
        if best is not None:
            self.listener(BestPredicted(best=best))
        _show_cost(job, predictions.values(), self.listener, self.clock)

        # 2. Use the user's earlier measurements.
        record = Record(job, self.versions)
        earlier = record.earlier()
        if earlier.unreadable:
            self._note(f"Skipped {earlier.unreadable} unreadable lines of the record.")
        trials = (*earlier.trials, *first_trials)
        study = open_study(job, candidates, baseline, predictions, earlier=trials)
        used = len(study.problem.earlier)
        if used and not first_trials:
            self._note(
                f"Earlier searches contribute {counted(used, 'measurement')}; --fresh ignores them."
            )

        # 3. Measure.
        announcing = self._announcing_best(job, study)
        listener = record.storing_probes(announcing)
        return run_search(
            job,
            study=study,
            executor=self.executor,
            listener=listener,
            clock=self.clock,
        )

    def _predict(self, job: Job, candidates: Sequence[Candidate]) -> Mapping[str, Prediction]:
        """Predict the candidates. Of a budget that the user stated, probes keep a share: what is
        not predicted by then is measured without a prediction.
        """
        seconds = math.inf if job.budget_adapts else PREDICTION_SHARE * self.clock.left
        ends = self.clock.elapsed + seconds
        predictions = predict_candidates(job, self.trainer, candidates, seconds=seconds)
        count = len({candidate.id for candidate in candidates})
        if len(predictions) < count and self.clock.elapsed >= ends:
            self._note(
                f"{PREDICTION_SHARE:.0%} of the budget was spent on predictions, of"
                f" {len(predictions)} of {counted(count, 'candidate')}; the others are measured"
                " without. The next run continues with the traces of this one."
            )
        return predictions

    def relaxed(self, request: ParsedRequest, first: Recommendation) -> SearchAnswer:
        """Return the answer to the wider job if nothing fits for lack of memory; otherwise
        `first`.
        """
        result = SearchAnswer(job=request.job, recommendation=first)
        if not self._lacks_memory(first):
            return result
        wider = relaxed_job(request.job, request.whole_space, request.pinned, self.trainer)
        if wider is None:
            return result
        space = wider.job.space
        names = ", ".join(name for name in space.relax if name in space)
        self._note(
            f"Nothing fits as it was asked. Relaxing learning knobs, in this order: {names}."
        )
        candidates = legal_candidates(wider.job, self.trainer)
        second = self.run(wider.job, candidates, first_trials=first.trials)
        left_out = rows_left_out(wider, second, self.trainer)
        joined = combined(first, second, left_out)
        if joined.winner is not None:
            relaxation = describe_relaxation(joined, request.job.space)
            self._note(relaxation)
        return SearchAnswer(job=wider.job, recommendation=joined)

    def _lacks_memory(self, answer: Recommendation) -> bool:
        """Return True if nothing fits for lack of memory, and there is time for a wider search."""
        if answer.winner is not None or answer.interrupted or not self.clock.left:
            return False
        ended = answer.proven in ("nothing fits", "not proven infeasible")
        if not ended or not answer.counts.out_of_memory:
            return False
        crashes = []
        for trial in answer.trials:
            measurement = trial.measurement
            if measurement.outcome is Outcome.CRASH:
                crashes.append(measurement)
        if not crashes:
            return True
        failure = crashes[-1].failure
        why = failure.evidence if failure else "no reason was given"
        self._note(
            f"Learning knobs are not relaxed: {counted(len(crashes), 'probe')} crashed, not for"
            f" lack of memory ({why})."
        )
        return False

    def _announcing_best(self, job: Job, study: Study) -> Listener:
        """Wrap the listener to send, with every new best, the answer as if the search ended
        there.
        """
        best: Candidate | None = None

        def receive(event: Event) -> None:
            nonlocal best
            self.listener(event)
            if not isinstance(event, ProbeEnded) or event.best is None:
                return
            if event.best.candidate == best:
                return
            best = event.best.candidate
            answer = conclude(
                study.view,
                job,
                proven=None,
                loads=self.executor.loads,
                elapsed_seconds=self.clock.elapsed,
            )
            self.listener(BestChanged(job=job, answer=answer))

        return receive

    def _note(self, text: str) -> None:
        self.listener(Note(text=text))


def _show_cost(
    job: Job,
    predictions: Iterable[Prediction],
    listener: Listener,
    clock: Clock,
) -> None:
    """Report the expected cost of a probe; extend the default budget if it is too small."""
    cost = None
    if not job.task.hardware.emulated:
        cost = probe_cost(predictions)
    if cost is None:
        return
    if job.budget_adapts:
        clock.budget_seconds = max(clock.budget_seconds, cost.search_seconds)
    listener(Note(text=cost.text(clock.budget_seconds)))
