"""Pipeline from a search request to its answer: stored answer, search, wider search if nothing fits, soak."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.answer import Recommendation, Trial
from autotune.core.events import BestChanged, Event, Listener, Note, ProbeEnded
from autotune.core.files import sqlite_url
from autotune.core.job import Job
from autotune.core.measurement import Outcome
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate
from autotune.frameworks.base import Trainer
from autotune.prediction.service import open_prediction_service, predict_candidates
from autotune.probe.executors.base import Executor
from autotune.request.job_builder import ParsedRequest
from autotune.search import relaxation
from autotune.search.advice import ways_to_fit
from autotune.search.conclusion import conclude
from autotune.search.loop import LONG_PROBE, SHORT_PROBE, Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.probe_cost import probe_cost
from autotune.search.record import Record
from autotune.search.soak import soak
from autotune.search.study import Study, open_study


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """Recommendation, and the job that it answers: a wider one than requested if knobs were relaxed."""

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
    found = _stored_answer(request, record, listener)
    if found is None:
        if job.storage == sqlite_url(job.out / "study.db"):
            job.out.mkdir(parents=True, exist_ok=True)
        # 3. Search; if nothing fits, search again with relaxed knobs.
        search = _Searcher(trainer=request.trainer, executor=executor, listener=listener, clock=clock, versions=versions)
        found = _with_ways_to_fit(search.relaxed(request, search.run(job, candidates)), request)
        record.keep_answer(found.recommendation)
    # 4. Soak the winner.
    if soak_seconds is None or found.recommendation.interrupted:
        return found
    return replace(found, recommendation=soak(found.job, found.recommendation, executor, listener, soak_seconds))


def _with_ways_to_fit(found: SearchAnswer, request: ParsedRequest) -> SearchAnswer:
    """Add predicted changes that make the baseline fit, if memory lacked everywhere. On a CPU nothing is predicted."""
    answer = found.recommendation
    concluded = answer.winner is None and not answer.interrupted
    if not concluded or not answer.counts.out_of_memory or request.job.task.hardware.kind != "cuda":
        return found
    refuted = [trial.candidate.id for trial in answer.trials if not trial.verdict.fits]
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
        ways = ways_to_fit(request, baseline_candidate(request.job, request.trainer), service, refuted)
    return replace(found, recommendation=replace(answer, ways_to_fit=ways))


def _stored_answer(request: ParsedRequest, record: Record, listener: Listener) -> SearchAnswer | None:
    known = record.answer()
    if known is None or known.from_record is None:
        return None
    source = known.from_record
    packages = " ".join(f"{name} {version}" for name, version in source.versions.items() if name in ("trl", "torch", "vllm"))
    where = f"{request.job.task.hardware.basis} {source.when} on {source.where}"
    listener(Note(text=f"From the record: {where} with {packages}. --fresh measures again."))
    wider = relaxation.relaxed(request.job, request.whole_space, request.pinned, request.trainer) if known.relaxed else None
    return SearchAnswer(job=wider.job if wider else request.job, recommendation=known)


@dataclass(frozen=True, kw_only=True)
class _Searcher:
    """Searches of one command, which share slots, budget and listener."""

    trainer: Trainer
    executor: Executor
    listener: Listener
    clock: Clock
    versions: Mapping[str, str]

    def run(self, job: Job, candidates: Sequence[Candidate], known: Sequence[Trial] = ()) -> Recommendation:
        record = Record(job, self.versions)
        baseline = baseline_candidate(job, self.trainer)
        predictions = predict_candidates(job, self.trainer, [*candidates, *([baseline] if baseline else [])])
        _show_cost(job, predictions.values(), self.listener, self.clock)
        earlier = record.earlier()
        if earlier.unreadable:
            self._note(f"Skipped {earlier.unreadable} unreadable lines of the record.")
        study = open_study(job, candidates, baseline, predictions, earlier=(*earlier.trials, *known))
        if (others := len(study.agenda.earlier)) and not known:
            self._note(f"{others} measurements of earlier searches count here as well; --fresh ignores them.")
        listener = record.storing_probes(self._announcing_best(job, study))
        return run_search(job, study=study, executor=self.executor, listener=listener, clock=self.clock)

    def relaxed(self, request: ParsedRequest, first: Recommendation) -> SearchAnswer:
        """Return the answer to the wider job if nothing fits for lack of memory; otherwise `first`."""
        found = SearchAnswer(job=request.job, recommendation=first)
        crashed = [trial for trial in first.trials if trial.measurement.outcome is Outcome.CRASH]
        ended = first.proven in ("no better candidate possible", "not proven infeasible")
        lacked_memory = first.counts.out_of_memory > 0 and ended
        if first.winner is not None or first.interrupted or not lacked_memory or not self.clock.left:
            return found
        if crashed:
            why = crashed[-1].measurement.failure.evidence if crashed[-1].measurement.failure else "no reason was given"
            self._note(f"Learning knobs are not relaxed: {len(crashed)} probes crashed, not for lack of memory ({why}).")
            return found
        wider = relaxation.relaxed(request.job, request.whole_space, request.pinned, self.trainer)
        if wider is None:
            return found
        names = ", ".join(name for name in wider.job.space.relax if name in wider.job.space)
        self._note(f"Nothing fits as it was asked. Relaxing learning knobs, in this order: {names}.")
        second = self.run(wider.job, legal_candidates(wider.job, self.trainer), known=first.trials)
        both = relaxation.combine(first, second, relaxation.rows_left_out(wider, second, self.trainer))
        if both.winner is not None:
            self._note(relaxation.describe(both, request.job.space))
        return SearchAnswer(job=wider.job, recommendation=both)

    def _announcing_best(self, job: Job, study: Study) -> Listener:
        """Wrap the listener to send, with every new best, the answer as if the search ended there."""
        best: Candidate | None = None

        def receive(event: Event) -> None:
            nonlocal best
            self.listener(event)
            if isinstance(event, ProbeEnded) and event.best is not None and event.best.candidate != best:
                best = event.best.candidate
                so_far = conclude(study.view, job, proven=None, loads=self.executor.loads, elapsed_seconds=self.clock.elapsed)
                self.listener(BestChanged(job=job, answer=so_far))

        return receive

    def _note(self, text: str) -> None:
        self.listener(Note(text=text))


def _show_cost(job: Job, predictions: Iterable[Prediction], listener: Listener, clock: Clock) -> None:
    """Report the expected cost of a probe; extend the default budget if it is too small."""
    cost = None if job.task.hardware.emulated else probe_cost(predictions, SHORT_PROBE, LONG_PROBE)
    if cost is None:
        return
    if job.budget_adapts:
        clock.budget_seconds = max(clock.budget_seconds, cost.search_seconds)
    listener(Note(text=cost.text(clock.budget_seconds)))
