"""Pipeline from a search request to its answer: stored answer, search, wider search if nothing
fits, soak."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.answer import Recommendation, Trial
from autotune.core.candidate import Candidate
from autotune.core.events import BestChanged, Event, Listener, Note, ProbeEnded
from autotune.core.files import sqlite_url
from autotune.core.job import Job
from autotune.core.measurement import Outcome
from autotune.core.prediction import Prediction
from autotune.prediction.service import predict_candidates
from autotune.probe.executors.base import Executor
from autotune.request.job_builder import ParsedRequest
from autotune.search import relaxation
from autotune.search.conclusion import conclude
from autotune.search.loop import LONG_PROBE, SHORT_PROBE, Clock, baseline_candidate, legal_candidates, run_search
from autotune.search.probe_cost import probe_cost
from autotune.search.record import Record
from autotune.search.soak import soak
from autotune.search.study import Study, open_study


@dataclass(frozen=True, kw_only=True)
class SearchAnswer:
    """Recommendation, and the job that it answers: a wider one than requested if knobs were
    relaxed."""

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
        found = SearchAnswer(job=job, recommendation=_search(request, candidates, executor, listener, clock, versions))
        found = _relaxed(request, found, executor, listener, clock, versions)
        record.keep_answer(found.recommendation)
    # 4. Soak the winner.
    if soak_seconds is None or found.recommendation.interrupted:
        return found
    return replace(found, recommendation=soak(found.job, found.recommendation, executor, listener, soak_seconds))


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


def _search(
    request: ParsedRequest,
    candidates: Sequence[Candidate],
    executor: Executor,
    listener: Listener,
    clock: Clock,
    versions: Mapping[str, str],
    known: Sequence[Trial] = (),
) -> Recommendation:
    job, trainer = request.job, request.trainer
    record = Record(job, versions)
    baseline = baseline_candidate(job, trainer)
    predictions = predict_candidates(job, trainer, [*candidates, *([baseline] if baseline else [])])
    _show_cost(job, predictions.values(), listener, clock)
    earlier = record.earlier()
    if earlier.unreadable:
        listener(Note(text=f"Skipped {earlier.unreadable} unreadable lines of the record."))
    study = open_study(job, candidates, baseline, predictions, earlier=(*earlier.trials, *known))
    if (others := len(study.agenda.earlier)) and not known:
        listener(Note(text=f"{others} measurements of earlier searches count here as well; --fresh ignores them."))
    listener = record.storing_probes(_announcing_best(listener, job, study, executor, clock))
    return run_search(job, study=study, executor=executor, listener=listener, clock=clock)


def _show_cost(job: Job, predictions: Iterable[Prediction], listener: Listener, clock: Clock) -> None:
    """Report what a probe is expected to cost; extend a budget that nobody stated."""
    cost = None if job.task.hardware.emulated else probe_cost(predictions, SHORT_PROBE, LONG_PROBE)
    if cost is None:
        return
    if job.budget_adapts:
        clock.budget_seconds = max(clock.budget_seconds, cost.search_seconds)
    listener(Note(text=cost.text(clock.budget_seconds)))


def _announcing_best(listener: Listener, job: Job, study: Study, executor: Executor, clock: Clock) -> Listener:
    """Wrap the listener to send, with every new best, the answer as if the search ended there."""
    best: Candidate | None = None

    def receive(event: Event) -> None:
        nonlocal best
        listener(event)
        if isinstance(event, ProbeEnded) and event.best is not None and event.best.candidate != best:
            best = event.best.candidate
            so_far = conclude(study.view, job, proven=None, loads=executor.loads, elapsed_seconds=clock.elapsed)
            listener(BestChanged(job=job, answer=so_far))

    return receive


def _relaxed(
    request: ParsedRequest,
    found: SearchAnswer,
    executor: Executor,
    listener: Listener,
    clock: Clock,
    versions: Mapping[str, str],
) -> SearchAnswer:
    """Return the answer to the wider job if nothing fits for lack of memory; otherwise `found`."""
    first = found.recommendation
    crashed = [trial for trial in first.trials if trial.measurement.outcome is Outcome.CRASH]
    lacked_memory = first.counts.out_of_memory > 0 and first.proven in ("no better candidate possible", "not proven infeasible")
    if first.winner is not None or first.interrupted or not lacked_memory or not clock.left:
        return found
    if crashed:
        why = crashed[-1].measurement.failure.evidence if crashed[-1].measurement.failure else "no reason was given"
        listener(Note(text=f"Learning knobs are not relaxed: {len(crashed)} probes crashed, not for lack of memory ({why})."))
        return found
    wider = relaxation.relaxed(request.job, request.whole_space, request.pinned, request.trainer)
    if wider is None:
        return found
    names = ", ".join(name for name in wider.job.space.relax if name in wider.job.space)
    listener(Note(text=f"Nothing fits as it was asked. Relaxing learning knobs, in this order: {names}."))
    candidates = legal_candidates(wider.job, request.trainer)
    second = _search(replace(request, job=wider.job), candidates, executor, listener, clock, versions, known=first.trials)
    both = relaxation.combine(first, second, relaxation.rows_left_out(wider, second, request.trainer))
    if both.winner is not None:
        listener(Note(text=relaxation.describe(both, request.job.space)))
    return SearchAnswer(job=wider.job, recommendation=both)
