"""Pipeline from a search request to its answer: stored answer, search, wider search if nothing
fits, soak.

Relaxation: if nothing fits at the requested learning knobs, the same job with a wider space is
searched. Knobs are relaxed in the declared order, except those pinned with --hold: first shorter
prompts, at percentiles of the dataset's own lengths, so that the number of dropped rows is known;
then the rest. The order of the tiers makes the first answer that fits the one that relaxes the
least.

Soak: a long run of the winner; if it does not hold, the next finalist replaces it and is soaked
too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.core.answer import Recommendation, Trial
from autotune.core.dataset import PromptLengths
from autotune.core.errors import BadInput
from autotune.core.events import BestChanged, Event, Listener, Note, ProbeEnded
from autotune.core.files import sqlite_url
from autotune.core.job import Job
from autotune.core.measurement import Measurement, Outcome, ProbePlan, Verdict, judge
from autotune.core.prediction import Prediction
from autotune.core.run_statistics import assess_soak, describe_soak
from autotune.core.space import Candidate, Knob, KnobValue, SearchSpace
from autotune.core.units import format_seconds
from autotune.frameworks.base import Trainer
from autotune.prediction.service import open_prediction_service, predict_candidates
from autotune.probe.executors.base import Executor
from autotune.request.job_builder import ParsedRequest
from autotune.request.measured_data import PERCENTILES, PROMPT_KNOB
from autotune.search.advice import ways_to_fit
from autotune.search.conclusion import changes_between, conclude, relaxed_in
from autotune.search.loop import Clock, baseline_candidate, legal_candidates, probe_cost, run_search
from autotune.search.record import Record
from autotune.search.study import Study, open_study
from autotune.search.trial_view import MAX_ATTEMPTS

MAX_HALVINGS = 2  # Halvings of a number for which the space lists no smaller value
GRACE_SECONDS = (
    600.0  # Time beyond the soak itself: loading, the last cycle, one evaluation and one save
)
MAX_SOAKS = 3  # Finalists to soak before the answer is that none held


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
    found = _stored_answer(request, record, listener)
    if found is None:
        if job.storage == sqlite_url(job.out / "study.db"):
            job.out.mkdir(parents=True, exist_ok=True)
        # 3. Search; if nothing fits, search again with relaxed knobs.
        search = _Searcher(
            trainer=request.trainer,
            executor=executor,
            listener=listener,
            clock=clock,
            versions=versions,
        )
        found = _with_ways_to_fit(search.relaxed(request, search.run(job, candidates)), request)
        record.keep_answer(found.recommendation)
    # 4. Soak the winner.
    if soak_seconds is None or found.recommendation.interrupted:
        return found
    return replace(
        found,
        recommendation=soak(found.job, found.recommendation, executor, listener, soak_seconds),
    )


def _with_ways_to_fit(found: SearchAnswer, request: ParsedRequest) -> SearchAnswer:
    """Add predicted changes that make the baseline fit, if memory lacked everywhere. On a CPU
    nothing is predicted.
    """
    answer = found.recommendation
    concluded = answer.winner is None and not answer.interrupted
    if not concluded or not answer.counts.out_of_memory or request.job.task.hardware.kind != "cuda":
        return found
    refuted = [trial.candidate.id for trial in answer.trials if not trial.verdict.fits]
    with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
        ways = ways_to_fit(
            request, baseline_candidate(request.job, request.trainer), service, refuted=refuted
        )
    return replace(found, recommendation=replace(answer, ways_to_fit=ways))


def _stored_answer(
    request: ParsedRequest, record: Record, listener: Listener
) -> SearchAnswer | None:
    known = record.answer()
    if known is None or known.from_record is None:
        return None
    source = known.from_record
    packages = " ".join(
        f"{name} {version}"
        for name, version in source.versions.items()
        if name in ("trl", "torch", "vllm")
    )
    where = f"{request.job.task.hardware.basis} {source.when} on {source.where}"
    listener(Note(text=f"From the record: {where} with {packages}. --fresh measures again."))
    wider = (
        relaxed_job(request.job, request.whole_space, request.pinned, request.trainer)
        if known.relaxed
        else None
    )
    return SearchAnswer(job=wider.job if wider else request.job, recommendation=known)


@dataclass(frozen=True, kw_only=True)
class _Searcher:
    """Searches of one command, which share slots, budget and listener."""

    trainer: Trainer
    executor: Executor
    listener: Listener
    clock: Clock
    versions: Mapping[str, str]

    def run(
        self, job: Job, candidates: Sequence[Candidate], known: Sequence[Trial] = ()
    ) -> Recommendation:
        record = Record(job, self.versions)
        baseline = baseline_candidate(job, self.trainer)
        predictions = predict_candidates(
            job, self.trainer, [*candidates, *([baseline] if baseline else [])]
        )
        _show_cost(job, predictions.values(), self.listener, self.clock)
        earlier = record.earlier()
        if earlier.unreadable:
            self._note(f"Skipped {earlier.unreadable} unreadable lines of the record.")
        study = open_study(
            job, candidates, baseline, predictions, earlier=(*earlier.trials, *known)
        )
        if (others := len(study.problem.earlier)) and not known:
            self._note(
                f"{others} measurements of earlier searches count here as well; --fresh ignores"
                " them."
            )
        listener = record.storing_probes(self._announcing_best(job, study))
        return run_search(
            job, study=study, executor=self.executor, listener=listener, clock=self.clock
        )

    def relaxed(self, request: ParsedRequest, first: Recommendation) -> SearchAnswer:
        """Return the answer to the wider job if nothing fits for lack of memory; otherwise
        `first`.
        """
        found = SearchAnswer(job=request.job, recommendation=first)
        crashed = [trial for trial in first.trials if trial.measurement.outcome is Outcome.CRASH]
        ended = first.proven in ("no better candidate possible", "not proven infeasible")
        lacked_memory = first.counts.out_of_memory > 0 and ended
        if (
            first.winner is not None
            or first.interrupted
            or not lacked_memory
            or not self.clock.left
        ):
            return found
        if crashed:
            why = (
                crashed[-1].measurement.failure.evidence
                if crashed[-1].measurement.failure
                else "no reason was given"
            )
            self._note(
                f"Learning knobs are not relaxed: {len(crashed)} probes crashed, not for lack of"
                f" memory ({why})."
            )
            return found
        wider = relaxed_job(request.job, request.whole_space, request.pinned, self.trainer)
        if wider is None:
            return found
        names = ", ".join(name for name in wider.job.space.relax if name in wider.job.space)
        self._note(
            f"Nothing fits as it was asked. Relaxing learning knobs, in this order: {names}."
        )
        second = self.run(wider.job, legal_candidates(wider.job, self.trainer), known=first.trials)
        both = _combined(first, second, _rows_left_out(wider, second, self.trainer))
        if both.winner is not None:
            self._note(describe_relaxation(both, request.job.space))
        return SearchAnswer(job=wider.job, recommendation=both)

    def _announcing_best(self, job: Job, study: Study) -> Listener:
        """Wrap the listener to send, with every new best, the answer as if the search ended
        there.
        """
        best: Candidate | None = None

        def receive(event: Event) -> None:
            nonlocal best
            self.listener(event)
            if (
                isinstance(event, ProbeEnded)
                and event.best is not None
                and event.best.candidate != best
            ):
                best = event.best.candidate
                so_far = conclude(
                    study.view,
                    job,
                    proven=None,
                    loads=self.executor.loads,
                    elapsed_seconds=self.clock.elapsed,
                )
                self.listener(BestChanged(job=job, answer=so_far))

        return receive

    def _note(self, text: str) -> None:
        self.listener(Note(text=text))


def _show_cost(
    job: Job, predictions: Iterable[Prediction], listener: Listener, clock: Clock
) -> None:
    """Report the expected cost of a probe; extend the default budget if it is too small."""
    cost = None if job.task.hardware.emulated else probe_cost(predictions)
    if cost is None:
        return
    if job.budget_adapts:
        clock.budget_seconds = max(clock.budget_seconds, cost.search_seconds)
    listener(Note(text=cost.text(clock.budget_seconds)))


@dataclass(frozen=True, kw_only=True)
class RelaxedJob:
    """Job with a wider space, and the dataset's prompt lengths."""

    job: Job
    prompts: PromptLengths | None


def relaxed_job(
    job: Job, whole_space: SearchSpace, pinned: Collection[str], trainer: Trainer
) -> RelaxedJob | None:
    """Return the job to search if nothing of this one fits; None if no knob may be relaxed."""
    names = [name for name in job.space.relax if name not in pinned]
    prompts = _prompt_lengths(job, trainer) if PROMPT_KNOB in names else None
    remedies = {knob.name: knob for knob in whole_space.remedies}
    choices: dict[str, tuple[KnobValue, ...]] = {}
    added: list[Knob] = []
    for name in names:
        if name in job.space:
            if softer := _softer(job.space[name], whole_space, prompts):
                choices[name] = (*job.space[name].choices, *softer)
        elif name in remedies:
            # Its conditions need not be knobs of the space: the trainer decides about legality.
            added.append(replace(remedies[name], when={}))
    if not choices and not added:
        return None
    space = job.space.with_choices(choices)
    space = replace(space, knobs=(*space.knobs, *added))
    return RelaxedJob(
        job=replace(job, space=space, study_name=f"{job.study_name}-relaxed"), prompts=prompts
    )


def _softer(knob: Knob, whole: SearchSpace, prompts: PromptLengths | None) -> tuple[KnobValue, ...]:
    """Return further values below the least preferred one, mildest first."""
    last = knob.choices[-1]
    listed = whole[knob.name].choices if knob.name in whole else ()
    if not isinstance(last, int) or isinstance(last, bool):
        return tuple(value for value in listed if value not in knob.choices)
    if knob.name == PROMPT_KNOB and prompts is not None:
        return _descending((prompts.percentiles.get(share) for share in PERCENTILES), last)
    return _descending(listed, last) or _descending(
        (last >> times for times in range(1, MAX_HALVINGS + 1)), last
    )


def _descending(values: Iterable[object], below: int) -> tuple[int, ...]:
    found = {value for value in values if isinstance(value, int) and 0 < value < below}
    return tuple(sorted(found, reverse=True))


def _combined(
    first: Recommendation, second: Recommendation, rows_left_out: int | None
) -> Recommendation:
    """Return the second search's answer with the measurements of both."""
    summed = (
        "probed",
        "out_of_memory",
        "failed",
        "confirmations",
        "refused_probed",
        "false_refusals",
    )
    counts = {name: getattr(first.counts, name) + getattr(second.counts, name) for name in summed}
    return replace(
        second,
        baseline=(
            first.baseline
            if second.baseline is None or not second.baseline.verdict.fits
            else second.baseline
        ),
        counts=replace(second.counts, **counts),
        trials=(*first.trials, *second.trials),
        probe_seconds=first.probe_seconds + second.probe_seconds,
        rows_left_out=rows_left_out,
    )


def _rows_left_out(found: RelaxedJob, answer: Recommendation, trainer: Trainer) -> int | None:
    """Return the number of dataset rows beyond the answer's shorter prompts; None if prompts
    were not relaxed.
    """
    if answer.winner is None or PROMPT_KNOB not in answer.relaxed or found.prompts is None:
        return None
    limit = answer.winner.candidate.settings.get(PROMPT_KNOB)
    within = _prompt_lengths(found.job, trainer, limit) if isinstance(limit, int) else None
    return None if within is None else within.rows - within.kept


def _prompt_lengths(job: Job, trainer: Trainer, limit: int | None = None) -> PromptLengths | None:
    """Return the lengths of the data's prompts; None if they can't be read."""
    try:
        return trainer.prompt_lengths(job.task, limit)
    except BadInput:
        return None


def describe_relaxation(answer: Recommendation, space: SearchSpace) -> str:
    """Return one sentence about the relaxed knobs, with the rows that are left out."""
    moved = [
        f"{name} {space[name].choices[0] if name in space else False} -> {value}"
        for name, value in answer.relaxed.items()
    ]
    left_out = (
        f"; {answer.rows_left_out} rows of the dataset are longer and left out"
        if answer.rows_left_out
        else ""
    )
    return f"Nothing fits as it was asked; it fits with {', '.join(moved)}{left_out}."


def soak(
    job: Job, answer: Recommendation, executor: Executor, listener: Listener, seconds: float
) -> Recommendation:
    """Return the answer with its soak; with another winner, or none, if the first did not hold."""
    if answer.winner is None:
        return answer
    plan = ProbePlan(
        optimizer_steps=3,
        soak_seconds=seconds,
        save_checkpoint=True,
        evaluate=True,
        deadline_seconds=seconds + GRACE_SECONDS,
    )
    workload = job.task.workload
    steps = {**workload.held, **workload.user_settings}.get(
        "max_steps"
    )  # of the real run, unless the data decide
    failed: tuple[Trial, ...] = ()
    with contextlib.closing(executor):
        for finalist in (
            answer.winner,
            *[trial for trial in answer.runner_ups if trial.verdict.fits][: MAX_SOAKS - 1],
        ):
            listener(
                Note(
                    text=(
                        f"Soaking the recommended candidate for {format_seconds(seconds)}, at the"
                        " longest lengths."
                    )
                )
            )
            try:
                measurement = _measured(executor, finalist, plan)
            except KeyboardInterrupt:
                return replace(answer, interrupted=True)
            if measurement.ended_from_outside:
                assert measurement.failure is not None
                listener(
                    Note(
                        text=(
                            f"The soak was interrupted {MAX_ATTEMPTS} times"
                            f" ({measurement.failure.evidence})."
                        )
                    )
                )
                return replace(answer, interrupted=True)
            trial = replace(
                finalist, purpose="confirm", measurement=measurement, verdict=judge(measurement)
            )
            found = assess_soak(
                measurement, steps if isinstance(steps, int) and steps > 0 else None
            )
            listener(Note(text=describe_soak(found)))
            seconds_held = trial.measurement.cost.total_seconds * job.task.hardware.count
            answer = replace(
                answer,
                soaks=(*answer.soaks, found),
                probe_seconds=answer.probe_seconds + seconds_held,
            )
            if found.holds:
                return _with_winner(job, answer, finalist, trial, failed)
            why = Verdict(
                fits=False, why=f"soaked: {found.why}", margin_bytes=trial.verdict.margin_bytes
            )
            failed = (*failed, replace(trial, verdict=why))
            listener(Note(text="It does not hold; the next finalist replaces it."))
    return replace(
        answer,
        winner=None,
        certificate=None,
        runner_ups=(),
        changes=(),
        relaxed={},
        refuted=(*answer.refuted, *failed),
        proven="not proven infeasible",
    )


def _measured(executor: Executor, finalist: Trial, plan: ProbePlan) -> Measurement:
    """Measure, again if another process ended the probe."""
    for _ in range(MAX_ATTEMPTS):
        measurement = executor.open(finalist.candidate).measure(finalist.candidate, plan)
        if not measurement.ended_from_outside:
            break
    return measurement


def _with_winner(
    job: Job, answer: Recommendation, winner: Trial, trial: Trial, failed: tuple[Trial, ...]
) -> Recommendation:
    """Keep the certificate of a first winner; certify a replacement by its soak."""
    if not failed:
        return answer
    baseline = answer.baseline.candidate if answer.baseline else None
    return replace(
        answer,
        winner=winner,
        certificate=trial,
        refuted=(*answer.refuted, *failed),
        runner_ups=tuple(one for one in answer.runner_ups if one.candidate != winner.candidate),
        changes=() if baseline is None else changes_between(job, baseline, winner.candidate),
        relaxed=relaxed_in(job, winner.candidate),
    )
