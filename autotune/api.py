"""Python API: `run`, `predict`, `diagnose`, `job`, with the flags of the command as keywords.

    answer = autotune.run(model="Qwen2.5-0.5B", budget="20m", listener=print)
    if answer.winner is not None:
        print(answer.files, answer.document["recommendation"]["tokens_per_second"])

Nothing is printed: a listener receives the events of `autotune.core.events`. Errors:
`autotune.core.errors`.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from autotune.core.answer import Forecast, Recommendation, WayToFit
from autotune.core.errors import BadInput, IllegalConfiguration, StorageLost
from autotune.core.events import (
    CandidatePredicted,
    JobStarted,
    Listener,
    Note,
    ShippedPredicted,
    ignore_events,
)
from autotune.core.job import Job
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.secrets import without_secret_arguments
from autotune.core.space import Candidate, KnobValue
from autotune.request.command_flags import PredictOptions, RunOptions
from autotune.request.flags import Flags, flags_of
from autotune.request.request_flags import RequestOptions

if TYPE_CHECKING:
    from autotune.diagnosis import Diagnosis
    from autotune.estimate.unknown_facts import FactVariant
    from autotune.prediction.service import PredictionService
    from autotune.request.job_builder import ParsedRequest
    from autotune.request.request_parser import RequestSources

MAP_FILE = "map.html"


@dataclass(
    frozen=True,
    kw_only=True,
    repr=False,
)
class RunAnswer:
    """Answer of `run`: a recommendation from measurements, or a forecast from predictions."""

    job: Job  # the answered job; its limits are wider than requested where settings were relaxed
    recommendation: Recommendation | None  # None: nothing could be measured here
    forecast: Forecast | None  # None: measured
    document: Mapping[str, Any]  # content of `run --json` and recommendation.json

    def __repr__(self) -> str:
        from autotune.report.document_types import read_answer
        from autotune.report.html.render import headline

        return f"<RunAnswer: {headline(read_answer(self.document))}>"

    @property
    def winner(self) -> Candidate | None:
        """Recommended configuration; None if nothing fits or the prediction is undecided."""
        answer = self.recommendation or self.forecast
        if answer is None or answer.winner is None:
            return None
        return answer.winner.candidate

    @property
    def files(self) -> tuple[Path, ...]:
        """Winner in the framework's own files, ready to train with."""
        recommended = self.document["recommendation"]
        return tuple(Path(file) for file in recommended["files"]) if recommended else ()


@dataclass(
    frozen=True,
    kw_only=True,
    repr=False,
)
class PredictAnswer:
    """Answer of `predict`."""

    job: Job
    candidate: Candidate
    prediction: Prediction
    ways: tuple[WayToFit, ...]  # changes that make it fit, cheapest first; empty if it fits
    document: Mapping[str, Any]  # content of `predict --json`

    def __repr__(self) -> str:
        from autotune.report.verdict_text import verdict_text

        return f"<PredictAnswer: {verdict_text(self.prediction)}>"


# Run.


def run(*, listener: Listener = ignore_events, **options: Unpack[RunOptions]) -> RunAnswer:
    """Recommend the fastest configuration that fits, by measurement on this machine or by
    prediction.

    Writes the same files as the command into `out`. Ctrl-C ends the search but not the answer: it
    is based on the measurements so far and marked by `recommendation.interrupted`. `soak="5m"`
    trains the winner that much longer.
    """
    return run_flags(flags_of(options), listener=listener)


def job(**options: Unpack[RunOptions]) -> Job:
    """Return the job of these flags, for a script that searches with Optuna itself."""
    from autotune.request.request_parser import read_sources

    return read_sources(flags_of(options)).parse(limit_prompts=True).job


def run_flags(flags: Flags, *, listener: Listener = ignore_events) -> RunAnswer:
    """Run a search for parsed flags."""
    from autotune.request.request_parser import read_sources

    return run_request(read_sources(flags), listener=listener)


def run_request(
    sources: RequestSources,
    *,
    listener: Listener,
    pinned: frozenset[str] = frozenset(),
) -> RunAnswer:
    """Run a search. `pinned` settings are never relaxed, like those of --hold."""
    from autotune.report.output_folder import check_folder, claimed_folder
    from autotune.report.trackers import check_tracker, log_answer
    from autotune.request.measured_data import with_row_lengths
    from autotune.request.request_parser import possible_candidates
    from autotune.search.loop import legal_candidates

    # 1. The job, and what could end it before anything is measured.
    request = with_row_lengths(sources.parse(limit_prompts=True))
    request = replace(request, pinned=request.pinned | pinned)
    check_folder(request.job.out)
    tracker = sources.values.search.tracker
    if tracker is not None:
        check_tracker(tracker)
    candidates = possible_candidates(request, legal_candidates)
    request = _with_share_notes(request, candidates)

    # 2. The answer.
    with claimed_folder(request.job.out):
        listener(_started(request, candidates))
        if request.job.mode == "predict":
            answer = _forecast(request, candidates, sources)
        else:
            answer = _search(request, candidates, sources, listener)
    if tracker is not None:
        problem = log_answer(tracker, request.job.study_name, answer.document)
        if problem is not None:
            listener(Note(text=problem))
    return answer


def _with_share_notes(request: ParsedRequest, candidates: tuple[Candidate, ...]) -> ParsedRequest:
    """Add what an engine's share means under the memory limit."""
    from autotune.frameworks.shares_in_files import limit_notes

    return replace(request, notes=(*request.notes, *limit_notes(request.job, candidates)))


def _started(request: ParsedRequest, candidates: tuple[Candidate, ...]) -> JobStarted:
    return JobStarted(
        job=request.job,
        candidates=candidates,
        assumed=request.assumed,
        notes=request.notes,
    )


def _forecast(
    request: ParsedRequest,
    candidates: tuple[Candidate, ...],
    sources: RequestSources,
) -> RunAnswer:
    """Predict all candidates; nothing is measured."""
    from autotune.prediction.service import open_prediction_service
    from autotune.search.advice import ways_to_fit
    from autotune.search.forecast_search import forecast
    from autotune.search.loop import baseline_candidate

    job = request.job
    trainer = request.trainer
    baseline = baseline_candidate(job, trainer)
    with contextlib.closing(open_prediction_service(job, trainer)) as service:
        answer = forecast(job, service, candidates, baseline)
        if answer.winner is None:
            answer = replace(answer, ways_to_fit=ways_to_fit(request, baseline, service))

    chosen = None if answer.winner is None else answer.winner.candidate
    document = _publish(
        request,
        answer,
        chosen,
        warnings=request.notes,
        commands=_map_command(request, sources),
        confirm_with=shlex.join(without_secret_arguments(sources.command_line(mode="probe"))),
    )
    return RunAnswer(
        job=job,
        recommendation=None,
        forecast=answer,
        document=document,
    )


def _search(
    request: ParsedRequest,
    candidates: tuple[Candidate, ...],
    sources: RequestSources,
    listener: Listener,
) -> RunAnswer:
    """Measure candidates on this machine."""
    from autotune.probe.executors import open_executor
    from autotune.report.output_folder import best_so_far_listener
    from autotune.search.pipeline import answer

    def write(job: Job, recommendation: Recommendation) -> Mapping[str, Any]:
        if not job.out.exists():
            listener(Note(text=f"--out {job.out} was deleted meanwhile; it is created again."))
        return _write_answer(replace(request, job=job), recommendation, sources)

    write_best = best_so_far_listener(listener, write)
    soak_seconds = sources.values.search.soak_seconds
    with contextlib.closing(open_executor(request.job, request.trainer)) as executor:
        result = answer(request, candidates, executor, write_best, soak_seconds=soak_seconds)
    recommendation = result.recommendation
    try:
        document = write(result.job, recommendation)
    except BadInput as unwritten:
        if recommendation.fault is None:
            raise
        commands = _next_commands(request.job.out, recommendation, sources)
        raise StorageLost(
            f"{recommendation.fault} {unwritten.what} Go on with: {commands['go on']}"
        ) from unwritten
    return RunAnswer(
        job=result.job,
        recommendation=recommendation,
        forecast=None,
        document=document,
    )


def _write_answer(
    request: ParsedRequest,
    answer: Recommendation,
    sources: RequestSources,
) -> Mapping[str, Any]:
    """Write the winner's files and the page into the output folder; return the document."""
    from autotune.report.output_folder import head_lines

    job = request.job
    winner = answer.winner
    if job.task.workload.script is not None and answer.certificate is None:
        winner = None  # no patch from a single short probe
    confirm_with = ""
    if job.mode == "emulate":  # the command that measures it on its target
        confirm_with = shlex.join(without_secret_arguments(sources.command_line(mode="probe")))
    return _publish(
        request,
        answer,
        None if winner is None else winner.candidate,
        head_lines(job, answer),
        warnings=(*request.notes, answer.fault) if answer.fault else request.notes,
        commands={
            **_next_commands(job.out, answer, sources),
            **_map_command(request, sources),
        },
        confirm_with=confirm_with,
    )


def _publish(
    request: ParsedRequest,
    answer: Recommendation | Forecast,
    candidate: Candidate | None,
    head: Sequence[str] = (),
    **parts: Any,
) -> Mapping[str, Any]:
    """Write the candidate's files, the page and recommendation.json into the output folder;
    return the document.
    """
    from autotune.report.answer_document import document
    from autotune.report.html.render import render
    from autotune.report.output_folder import publish, write_files

    job = request.job
    section = None

    def write(*folders: Path) -> list[Path]:
        nonlocal section
        if candidate is None:
            return []
        files, section = write_files(job, request.trainer, candidate, head, *folders)
        return files

    def describe(files: list[str]) -> Mapping[str, Any]:
        return document(job, answer, files, file=section, **parts)

    return publish(job.out, write, describe, render)


def _next_commands(
    out: Path,
    answer: Recommendation,
    sources: RequestSources,
) -> dict[str, str]:
    """Return the commands to train, to measure again and to continue, without secrets. Flags go
    before a bare `--`.
    """
    arguments = without_secret_arguments(sources.command_line())
    arguments = [word for word in arguments if word not in ("--fresh", "--resume")]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    commands = {}
    if answer.winner is not None:
        commands["train"] = shlex.join(["bash", str(out / "launch.sh")])
    commands["measure again"] = shlex.join([*arguments[:end], "--fresh", *arguments[end:]])
    commands["go on"] = shlex.join([*arguments[:end], "--resume", *arguments[end:]])
    return commands


def _map_command(request: ParsedRequest, sources: RequestSources) -> dict[str, str]:
    """Return the command that writes the map of the space beside the report, by its name there;
    none where nothing is predicted.
    """
    job = request.job
    if job.task.hardware.kind != "cuda" or not request.trainer.trace_adapter:
        return {}
    line = without_secret_arguments(sources.map_command_line(job.out / MAP_FILE))
    return {MAP_FILE: shlex.join(line)}


# Predict.


def predict(
    *, listener: Listener = ignore_events, **options: Unpack[PredictOptions]
) -> PredictAnswer:
    """Predict without a GPU whether a configuration fits, with the parts of its memory and ways
    to make it fit.
    """
    return predict_flags(flags_of(options), listener=listener)


def predict_flags(
    flags: Flags,
    *,
    quick: bool = False,
    listener: Listener = ignore_events,
) -> PredictAnswer:
    """Predict one configuration for parsed flags. `quick`: with a step model of the package where
    it has one, also for other releases than those of the training environment.
    """
    from autotune.estimate.unknown_facts import agreed, worst
    from autotune.prediction.guarded_runs import (
        finished_text,
        refusal_of,
        refusal_text,
        refuted,
    )
    from autotune.prediction.service import open_prediction_service
    from autotune.report.answer_document import prediction_document
    from autotune.request.explanation import origins
    from autotune.request.measured_data import with_row_lengths
    from autotune.request.request_parser import read_sources
    from autotune.search.shown_room import room_after, ways_within

    # 1. One prediction for each combination of unknown values.
    possible, notes = _legal_variants(read_sources(flags, mode="predict"))
    first = possible[0].request
    service = open_prediction_service(first.job, first.trainer)
    shipped_service = _service_of_package(possible, service)
    if shipped_service is not None and quick:
        service = shipped_service
    elif shipped_service is not None:
        shipped = shipped_service.predict(possible[0].candidate)
        listener(ShippedPredicted(prediction=shipped))
    with contextlib.closing(service):
        variants = _predicted_variants(possible, service)

        # 2. The worst combination represents the request.
        prediction = agreed(variants)
        worst_variant = worst(variants)
        candidate = worst_variant.candidate
        request = possible[variants.index(worst_variant)].request
        request = with_row_lengths(replace(request, notes=(*request.notes, *notes)))
        request = _with_share_notes(request, (candidate,))
        listener(_started(request, (candidate,)))
        refusal = refusal_of(request.job, candidate, prediction.versions)
        refused_because: str | None = None
        if refusal is not None:
            prediction = refuted(prediction, refusal)
            refused_because = refusal_text(refusal)
            listener(Note(text=refused_because))
        else:
            measured = finished_text(request.job, candidate, prediction.versions)
            if measured is not None:
                listener(Note(text=measured))
        listener(CandidatePredicted(candidate=candidate, prediction=prediction))

        # 3. Changes that make it fit.
        ways: tuple[WayToFit, ...] = ()
        if refusal is not None:
            peak = worst_variant.prediction.peak_memory_bytes
            room = room_after(refusal, round(peak.value))
            ways = ways_within(
                request, candidate, service.of(request.job), room, refuted={candidate.id}
            )
        elif not prediction.fits:
            from autotune.search.advice import ways_to_fit

            ways = ways_to_fit(
                request,
                candidate,
                service.of(request.job),
                prediction=worst_variant.prediction,
                listener=listener,
            )
    document = prediction_document(
        request.job,
        candidate,
        prediction,
        ways,
        origins=origins(request, candidate),
        unknown=variants if worst_variant.facts else (),
        refusal=refused_because,
    )
    return PredictAnswer(
        job=request.job,
        candidate=candidate,
        prediction=prediction,
        ways=ways,
        document=document,
    )


def _service_of_package(
    possible: Sequence[_LegalVariant], service: PredictionService
) -> PredictionService | None:
    """Return a service that answers with the package's step models alone, if the environment has
    other releases and can trace their step; None for a request with unknown values.
    """
    from autotune.prediction.service import open_prediction_service

    if len(possible) > 1 or not service.is_shipped_elsewhere(possible[0].candidate):
        return None
    request = possible[0].request
    return open_prediction_service(request.job, request.trainer, traces=False)


def _predicted_variants(
    possible: Sequence[_LegalVariant], service: PredictionService
) -> list[FactVariant]:
    from autotune.estimate.unknown_facts import FactVariant

    variants = []
    for variant in possible:
        prediction = service.of(variant.request.job).predict(variant.candidate)
        variants.append(
            FactVariant(
                facts=variant.facts,
                candidate=variant.candidate,
                prediction=prediction,
            )
        )
    return variants


@dataclass(frozen=True, kw_only=True)
class _LegalVariant:
    """Request with one combination of unknown values, which its framework accepts."""

    facts: Mapping[str, KnobValue]
    request: ParsedRequest
    candidate: Candidate


def _legal_variants(sources: RequestSources) -> tuple[list[_LegalVariant], tuple[str, ...]]:
    """Return the legal combinations of unknown values, with notes on illegal ones, which cannot
    have been run.
    """
    from autotune.request.job_builder import candidate_of_job

    variants: list[_LegalVariant] = []
    notes: list[str] = []
    refusals: list[IllegalConfiguration] = []
    for facts, variant in sources.variants():
        request = variant.parse(limit_prompts=True)
        try:
            candidate = candidate_of_job(request)
        except IllegalConfiguration as refusal:
            refusals.append(refusal)
            stated = " ".join(f"{name}={value}" for name, value in facts.items())
            notes.append(f"{stated} is left out: {refusal.what}")
        else:
            variants.append(
                _LegalVariant(
                    facts=facts,
                    request=request,
                    candidate=candidate,
                )
            )
    if not variants:
        raise refusals[0]
    return variants, tuple(notes)


def emulate_flags(flags: Flags) -> Measurement:
    """Probe one configuration on emulated GPUs, for flags that `check_can_emulate` accepted."""
    from autotune.core.measurement import ProbePlan
    from autotune.probe.executors import open_executor
    from autotune.request.job_builder import candidate_of_job
    from autotune.request.request_parser import read_sources

    request = read_sources(flags, mode="emulate").parse(limit_prompts=True)
    candidate = candidate_of_job(request)
    with contextlib.closing(open_executor(request.job, request.trainer)) as executor:
        return executor.open(candidate).measure(candidate, ProbePlan())


def check_can_emulate(flags: Flags) -> None:
    """Raise the error that prevents `emulate_flags`, before anything is traced."""
    from autotune.emulator.build import build, look
    from autotune.emulator.cards import emulated_machine
    from autotune.machine.environment import interpreter
    from autotune.request.request_parser import read_sources

    values = read_sources(flags, mode="predict").values
    if values.settings.unknown:
        raise BadInput(
            "--check emulates one configuration.",
            way_out="Give each --unknown value with --set, or leave out --check.",
        )
    emulated_machine(values.hardware.gpus)
    build(look(interpreter(values.training.python)))


# Diagnose.


def diagnose(
    log: str | PathLike[str] | Iterable[str], **options: Unpack[RequestOptions]
) -> Diagnosis:
    """Find the first failure in a training log (a file or its lines), with remedies.

    With `config` (the failed file) and `gpus` (its hardware; default: this machine's) remedies have
    predicted effects, or a remark has the reason that none can be predicted.
    """
    from autotune.diagnosis import diagnose_lines
    from autotune.diagnosis.log_files import lines_of_file

    lines = lines_of_file(str(log)) if isinstance(log, str | PathLike) else log
    diagnosis = diagnose_lines(lines)
    if not options.get("config"):
        return diagnosis
    return _with_predicted_effects(diagnosis, flags_of(options))


def _with_predicted_effects(diagnosis: Diagnosis, flags: Flags) -> Diagnosis:
    from autotune.diagnosis.remedies import with_effects
    from autotune.prediction.service import open_prediction_service
    from autotune.request.job_builder import candidate_of_job
    from autotune.request.request_parser import failed_file, read_sources

    file = failed_file(flags)
    try:
        request = read_sources(flags, mode="predict").parse(limit_prompts=True)
        candidate = candidate_of_job(request)
        with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
            return with_effects(diagnosis, request, candidate, service)
    except BadInput as error:
        remark = f"nothing could be predicted for {file}: {error}"
        return replace(diagnosis, remarks=(*diagnosis.remarks, remark))
