"""Python API: `run`, `predict` and `diagnose`, with the flags of the command line as keywords.

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
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from autotune.core.answer import Forecast, Recommendation, WayToFit
from autotune.core.errors import BadInput, IllegalConfiguration, StorageLost
from autotune.core.events import CandidatePredicted, JobStarted, Listener, Note, ignore_events
from autotune.core.job import Job
from autotune.core.measurement import Measurement
from autotune.core.prediction import Prediction
from autotune.core.space import Candidate, KnobValue
from autotune.request.flags import (
    Flags,
    PredictOptions,
    RequestOptions,
    RunOptions,
    flags_of,
    typed,
)

if TYPE_CHECKING:
    from autotune.diagnosis import Diagnosis
    from autotune.request.job_builder import ParsedRequest


@dataclass(frozen=True, kw_only=True)
class RunAnswer:
    """Answer of `run`: a recommendation from measurements, or a forecast from predictions."""

    job: Job  # the answered job; its limits are wider than requested where settings were relaxed
    recommendation: Recommendation | None  # None: nothing could be measured here
    forecast: Forecast | None  # None: measured
    document: Mapping[str, Any]  # content of `run --json` and recommendation.json

    @property
    def winner(self) -> Candidate | None:
        """Recommended configuration; None if nothing fits or the prediction is undecided."""
        best = (
            self.recommendation.winner
            if self.recommendation
            else self.forecast.winner
            if self.forecast
            else None
        )
        return None if best is None else best.candidate

    @property
    def files(self) -> tuple[Path, ...]:
        """Winner in the framework's own files, ready to train with."""
        recommended = self.document["recommendation"]
        return tuple(Path(file) for file in recommended["files"]) if recommended else ()


@dataclass(frozen=True, kw_only=True)
class PredictAnswer:
    """Answer of `predict`."""

    job: Job
    candidate: Candidate
    prediction: Prediction
    ways: tuple[WayToFit, ...]  # changes that make it fit, cheapest first; empty if it fits
    document: Mapping[str, Any]  # content of `predict --json`


def run(*, listener: Listener = ignore_events, **options: Unpack[RunOptions]) -> RunAnswer:
    """Recommend the fastest configuration that fits, by measurement on this machine or by
    prediction.

    Writes the same files as the command into `out`. Ctrl-C ends the search but not the answer: it
    is based on the measurements so far and marked by `recommendation.interrupted`. `soak="5m"`
    trains the winner that much longer.
    """
    return run_flags(flags_of(options), listener=listener)


def run_flags(
    flags: Flags, *, listener: Listener = ignore_events, pinned: frozenset[str] = frozenset()
) -> RunAnswer:
    """Run a search for parsed flags. `pinned` settings are never relaxed, like those of --hold."""
    from autotune.core.units import parse_seconds
    from autotune.report.output_folder import check_folder, claimed_folder
    from autotune.report.trackers import check_tracker, log_answer
    from autotune.request.request_parser import parse_request, possible_candidates
    from autotune.search.loop import legal_candidates

    request = parse_request(flags, limit_prompts=True)
    request = replace(_with_data(request), pinned=request.pinned | pinned)
    check_folder(request.job.out)
    if flags.log_to is not None:
        check_tracker(flags.log_to)
    soak_seconds = None if flags.soak is None else parse_seconds(flags.soak)
    candidates = possible_candidates(request, legal_candidates)
    request = _with_share_notes(request, candidates)
    with claimed_folder(request.job.out):
        listener(_started(request, candidates))
        if request.job.mode == "predict":
            confirm_with = shlex.join(["autotune", "run", *typed(flags.replace(mode="probe"))])
            answer = _forecast(request, candidates, confirm_with=confirm_with)
        else:
            answer = _search(
                request, candidates, ["autotune", "run", *typed(flags)], listener, soak_seconds
            )
    if flags.log_to is not None:
        unlogged = log_answer(flags.log_to, request.job.study_name, answer.document)
        if unlogged is not None:
            listener(Note(text=unlogged))
    return answer


def predict(
    *, listener: Listener = ignore_events, **options: Unpack[PredictOptions]
) -> PredictAnswer:
    """Predict without a GPU whether a configuration fits, with the parts of its memory and ways
    to make it fit.
    """
    return predict_flags(flags_of(options), listener=listener)


def predict_flags(flags: Flags, *, listener: Listener = ignore_events) -> PredictAnswer:
    """Predict one configuration for parsed flags."""
    from autotune.estimate.unknown_facts import FactVariant, agreed, worst
    from autotune.prediction.service import open_prediction_service
    from autotune.report.answer_document import prediction_document
    from autotune.search.advice import ways_to_fit

    # 1. One prediction for each combination of unknown facts.
    possible, notes = _variants(flags.replace(mode="predict"))
    first = possible[0][1]
    with contextlib.closing(open_prediction_service(first.job, first.trainer)) as service:
        variants = [
            FactVariant(
                facts=facts,
                candidate=candidate,
                prediction=service.of(request.job).predict(candidate),
            )
            for facts, request, candidate in possible
        ]
        # 2. The worst combination represents the request.
        most, prediction = worst(variants), agreed(variants)
        request = next(one for facts, one, _ in possible if facts == most.facts)
        candidate = most.candidate
        request = _with_data(replace(request, notes=(*request.notes, *notes)))
        request = _with_share_notes(request, (candidate,))
        job = request.job
        listener(_started(request, (candidate,)))
        listener(CandidatePredicted(candidate=candidate, prediction=prediction))
        # 3. Changes that make it fit.
        ways = (
            ()
            if prediction.fits
            else ways_to_fit(request, candidate, service.of(job), prediction=most.prediction)
        )
    document = prediction_document(
        job, candidate, prediction, ways, unknown=variants if most.facts else ()
    )
    return PredictAnswer(
        job=job, candidate=candidate, prediction=prediction, ways=ways, document=document
    )


def emulate_flags(flags: Flags) -> Measurement:
    """Probe one configuration on emulated GPUs, for flags that `check_can_emulate` accepted."""
    from autotune.core.measurement import ProbePlan
    from autotune.probe.executors import open_executor
    from autotune.request.job_builder import candidate_of_job
    from autotune.request.request_parser import parse_request

    request = parse_request(flags.replace(mode="emulate"), limit_prompts=True)
    candidate = candidate_of_job(request)
    with contextlib.closing(open_executor(request.job, request.trainer)) as executor:
        return executor.open(candidate).measure(candidate, ProbePlan())


def check_can_emulate(flags: Flags) -> None:
    """Raise the error that prevents `emulate_flags`, before anything is traced."""
    from autotune.emulator.build import build, look
    from autotune.emulator.cards import emulated_machine
    from autotune.machine.environment import interpreter

    if flags.unknown:
        raise BadInput(
            "--check emulates one configuration.",
            way_out="Give each --unknown value with --set, or leave out --check.",
        )
    emulated_machine(flags.gpus)
    build(look(interpreter(flags.python)))


def diagnose(
    log: str | PathLike[str] | Iterable[str], **options: Unpack[RequestOptions]
) -> Diagnosis:
    """Find the first failure in a training log (a file or its lines), with remedies.

    With `config` (the failed file) and `gpus` (its hardware; default: this machine's) remedies have
    predicted effects, or a remark has the reason that none can be predicted.
    """
    from autotune.diagnosis import diagnose_lines
    from autotune.diagnosis.log_files import lines_of_file

    found = diagnose_lines(lines_of_file(str(log)) if isinstance(log, str | PathLike) else log)
    if not options.get("config"):
        return found
    from autotune.diagnosis.remedies import with_effects
    from autotune.machine import hardware_detection
    from autotune.prediction.service import open_prediction_service
    from autotune.request.job_builder import candidate_of_job
    from autotune.request.request_parser import parse_request

    flags = flags_of(options)
    if flags.gpus == "local" and hardware_detection.hardware("local").kind != "cuda":
        raise BadInput(
            "--config is predicted for GPUs, and this machine has none.",
            way_out="Name the failed run's GPUs: --gpus 2xA100-40G",
        )
    if not Path(str(flags.config)).is_file():
        raise BadInput(
            f"--config {flags.config} is no file.",
            way_out="Name the YAML file that was given to `trl grpo --config`.",
        )
    try:
        request = parse_request(flags.replace(mode="predict"), limit_prompts=True)
        candidate = candidate_of_job(request)
        with contextlib.closing(open_prediction_service(request.job, request.trainer)) as service:
            return with_effects(found, request, candidate, service)
    except BadInput as error:
        why = f"nothing could be predicted for {flags.config}: {error}"
        return replace(found, remarks=(*found.remarks, why))


def _with_data(request: ParsedRequest) -> ParsedRequest:
    """Add the row lengths of the user's data. Unreadable data add a note."""
    job = request.job
    try:
        found = request.trainer.row_lengths(job.task)
    except BadInput as error:
        return replace(request, notes=(*request.notes, error.what))
    return replace(request, job=replace(job, data=found)) if found else request


def _with_share_notes(request: ParsedRequest, candidates: tuple[Candidate, ...]) -> ParsedRequest:
    """Add what an engine's share means under the memory limit."""
    from autotune.frameworks.shares_in_files import limit_notes

    return replace(request, notes=(*request.notes, *limit_notes(request.job, candidates)))


def _variants(
    flags: Flags,
) -> tuple[list[tuple[Mapping[str, KnobValue], ParsedRequest, Candidate]], tuple[str, ...]]:
    """Return the legal combinations of unknown facts, with notes on illegal ones, which cannot
    have been run.
    """
    from autotune.request.assignments import ways_of
    from autotune.request.job_builder import candidate_of_job
    from autotune.request.request_parser import parse_request

    found, notes, refusal = [], [], None
    for facts, given in ways_of(flags):
        request = parse_request(given, limit_prompts=True)
        try:
            found.append((facts, request, candidate_of_job(request)))
        except IllegalConfiguration as error:
            refusal = refusal or error
            notes.append(
                f"{' '.join(f'{name}={value}' for name, value in facts.items())} is left out:"
                f" {error.what}"
            )
    if refusal is not None and not found:
        raise refusal
    return found, tuple(notes)


def _started(request: ParsedRequest, candidates: tuple[Candidate, ...]) -> JobStarted:
    return JobStarted(
        job=request.job, candidates=candidates, assumed=request.assumed, notes=request.notes
    )


def _search(
    request: ParsedRequest,
    candidates: tuple[Candidate, ...],
    words: list[str],
    listener: Listener,
    soak_seconds: float | None,
) -> RunAnswer:
    """Measure candidates on this machine."""
    from autotune.probe.executors import open_executor
    from autotune.report.output_folder import best_so_far_listener
    from autotune.search.pipeline import answer

    def written(job: Job, found: Recommendation) -> Mapping[str, Any]:
        if not job.out.exists():
            listener(Note(text=f"--out {job.out} was deleted meanwhile; it is created again."))
        return _written(replace(request, job=job), found, words)

    write_best = best_so_far_listener(listener, written)
    with contextlib.closing(open_executor(request.job, request.trainer)) as executor:
        found = answer(request, candidates, executor, write_best, soak_seconds=soak_seconds)
    try:
        document = written(found.job, found.recommendation)
    except BadInput as unwritten:
        if found.recommendation.fault is None:
            raise
        go_on = _next_commands(request.job.out, found.recommendation, words)["go on"]
        raise StorageLost(
            f"{found.recommendation.fault} {unwritten.what} Go on with: {go_on}"
        ) from unwritten
    return RunAnswer(
        job=found.job, recommendation=found.recommendation, forecast=None, document=document
    )


def _written(request: ParsedRequest, answer: Recommendation, words: list[str]) -> Mapping[str, Any]:
    """Write the winner's files and the page into the output folder; return the document."""
    from autotune.report.output_folder import head_lines

    job, winner = request.job, answer.winner
    if job.task.workload.script is not None and answer.certificate is None:
        winner = None  # no patch from a single short probe
    confirm_with = ""
    if job.mode == "emulate":  # the command that measures it on its target
        replaced = (
            "probe" if word == "emulate" and before == "--mode" else word
            for before, word in pairwise(["", *words])
        )
        confirm_with = shlex.join(replaced)
    commands = _next_commands(job.out, answer, words)
    notes = (*request.notes, answer.fault) if answer.fault else request.notes
    candidate = None if winner is None else winner.candidate
    head = head_lines(job, answer)
    return _publish(
        request,
        answer,
        candidate,
        head,
        warnings=notes,
        commands=commands,
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

    job, section = request.job, None

    def write(*folders: Path) -> list[Path]:
        nonlocal section
        if candidate is None:
            return []
        files, section = write_files(job, request.trainer, candidate, head, *folders)
        return files

    return publish(
        job.out, write, lambda files: document(job, answer, files, file=section, **parts), render
    )


def _next_commands(out: Path, answer: Recommendation, words: list[str]) -> dict[str, str]:
    """Return the commands to train, to measure again and to continue. Flags go before a bare
    `--`.
    """
    words = [word for word in words if word not in ("--fresh", "--resume")]
    end = words.index("--") if "--" in words else len(words)
    again, go_on = (
        shlex.join([*words[:end], flag, *words[end:]]) for flag in ("--fresh", "--resume")
    )
    train = {} if answer.winner is None else {"train": shlex.join(["bash", str(out / "launch.sh")])}
    return {**train, "measure again": again, "go on": go_on}


def _forecast(
    request: ParsedRequest, candidates: tuple[Candidate, ...], *, confirm_with: str
) -> RunAnswer:
    """Predict all candidates; nothing is measured."""
    from autotune.prediction.service import open_prediction_service
    from autotune.search.advice import ways_to_fit
    from autotune.search.forecast_search import forecast
    from autotune.search.loop import baseline_candidate

    job, trainer = request.job, request.trainer
    baseline = baseline_candidate(job, trainer)
    with contextlib.closing(open_prediction_service(job, trainer)) as service:
        answer = forecast(job, service, candidates, baseline)
        if answer.winner is None:
            answer = replace(answer, ways_to_fit=ways_to_fit(request, baseline, service))
    chosen = None if answer.winner is None else answer.winner.candidate
    described = _publish(request, answer, chosen, warnings=request.notes, confirm_with=confirm_with)
    return RunAnswer(job=job, recommendation=None, forecast=answer, document=described)
