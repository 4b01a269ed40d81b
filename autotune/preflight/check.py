"""Preflight check: proves that a configuration fits here, or searches for one that does.

    found = preflight("train.yaml", tune=True)
    if found.use is not None:
        subprocess.run(["trl", "grpo", "--config", str(found.use)])

The answer comes from the record if the same was measured under the same circumstances, else from
one short worst-case probe.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack

from packaging.version import Version

from autotune import catalog
from autotune.api.answers import RunAnswer
from autotune.api.run_requests import run_request
from autotune.core.answer import Trial
from autotune.core.errors import BadInput, ProbeError
from autotune.core.events import JobStarted, Listener, Note, ProbeEnded, ProbeStarted, ignore_events
from autotune.core.headroom import NO_HEADROOM
from autotune.core.job import Job
from autotune.core.measurement import Measurement, judge
from autotune.core.space import Candidate
from autotune.core.units import counted, format_bytes
from autotune.frameworks.shares_in_files import limit_notes, with_room
from autotune.machine.hardware_detection import gpu_of
from autotune.preflight.proofs import PROOF, Proof, Proofs, decided, longest_prompt
from autotune.probe.executors import open_executor
from autotune.probe.executors.base import Executor
from autotune.report.certificate import certificate_row
from autotune.request.flags import Flags, flags_of
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.measured_data import PROMPT_KNOB, hold_longest_prompt
from autotune.request.origins import Source
from autotune.request.request_flags import CommonOptions
from autotune.request.request_parser import RequestSources, read_sources
from autotune.search.record import Record

SCHEMA = 1
RECOMMENDED = "recommended"

Status = Literal["fits", "tuned", "does_not_fit", "nothing_fits", "undecided", "interrupted"]
"""`tuned`: another configuration was found and certified; `nothing_fits`: none was; `undecided`:
the probe failed for another reason than memory, or the budget ended before the best candidate
was certified.
"""

MAX_PROBE_TRIES = 2  # attempts after faults of the machine
# First release in which `torch.cuda.set_device(0)` makes a context (issue 155668)
TORCH_OF_LAUNCHER_CONTEXT = Version("2.8")


@dataclass(
    frozen=True,
    kw_only=True,
    repr=False,
)
class Preflight:
    """Result of a preflight: proof, and the configuration to train with."""

    job: Job
    candidate: Candidate  # the configuration with its longest prompt
    proof: Proof
    from_record: bool  # measured earlier
    missed: str | None  # reason for measuring again; None: the record answered
    tuned: RunAnswer | None  # search for another configuration; None: not needed or not requested
    use: Path | None  # file to train with: the configuration or the tuned one; None: nothing fits
    elapsed_seconds: float

    def __repr__(self) -> str:
        verdict = self.proof.trial.verdict
        status = self.status.replace("_", " ")
        return f"<Preflight: {status}; {verdict.why}>"

    @property
    def fits(self) -> bool | None:
        """Result for the configuration itself; None: undecided."""
        return decided(self.proof.trial)

    @property
    def status(self) -> Status:
        """Result in one word."""
        if self.fits is None:
            return "undecided"
        if self.fits:
            return "fits"
        if self.tuned is None or self.tuned.recommendation is None:
            return "does_not_fit"
        answer = self.tuned.recommendation
        if answer.interrupted:
            return "interrupted"
        if answer.winner is None and self.tuned.document["status"] == "nothing_fits":
            return "nothing_fits"
        if answer.winner is None or self.use is None:
            return "undecided"
        return "tuned"

    @property
    def document(self) -> dict[str, Any]:
        trial = self.proof.trial
        proof = self.proof
        memory = trial.measurement.memory
        source = use = tuned = None
        if self.from_record:
            source = {"when": proof.when, "where": proof.where}
        if self.use is not None:
            use = str(self.use)
        if self.tuned is not None:
            tuned = dict(self.tuned.document)
        return {
            "schema": SCHEMA,
            "status": self.status,
            "fits": self.fits,
            "basis": "measured",
            "config": str(self.job.task.workload.config_file),
            "use": use,
            "outcome": str(trial.measurement.outcome),
            "why": trial.verdict.why,
            "peak_memory_bytes": memory.peak_bytes,
            "limit_bytes": memory.limit_bytes,
            "margin_bytes": trial.verdict.margin_bytes,
            "settings": dict(self.candidate.settings),
            "certificate": proof.certificate,
            "from_record": source,
            "missed": self.missed,
            "tuned": tuned,
            "versions": dict(trial.measurement.versions),
            "elapsed_seconds": round(self.elapsed_seconds, 3),
        }


def preflight(
    config: str | PathLike[str],
    *,
    tune: bool = False,
    out: str | PathLike[str] = "autotune-out",
    budget: str = "20m",
    fresh: bool = False,
    listener: Listener = ignore_events,
    **options: Unpack[CommonOptions],
) -> Preflight:
    """Prove that a configuration fits on this machine; with `tune`, search for one that does: by
    neutral settings only.
    """
    own_options = {"config": str(config), "out": str(out), "budget": budget, "fresh": fresh}
    # No other flags: the proof must refer to the file.
    flags = flags_of(
        {**options, **own_options}, names={*CommonOptions.__annotations__, *own_options}
    )
    return preflight_flags(flags, tune=tune, listener=listener)


def preflight_flags(
    flags: Flags,
    *,
    tune: bool = False,
    listener: Listener = ignore_events,
) -> Preflight:
    start = time.monotonic()
    sources = read_sources(flags, mode="probe")
    request = sources.parse()
    _refuse_another_number_of_processes(request.job)
    with contextlib.closing(open_executor(request.job, request.trainer)) as executor:
        # 1. The configuration at its worst: with its longest prompt, beside the launcher.
        versions = executor.prepare()
        request = _at_its_longest(request, versions)
        launcher = launcher_bytes(request.job, versions)
        if launcher:
            listener(Note(text=_launcher_note(launcher)))
            job = with_room(request.job, launcher, request.trainer.fields())
            request = replace(request, job=job)
        candidate = candidate_of_job(request)
        listener(
            JobStarted(
                job=request.job,
                candidates=(candidate,),
                assumed=request.assumed,
                notes=(*request.notes, *limit_notes(request.job, (candidate,))),
            )
        )

        # 2. Its proof, from the record or measured now.
        proofs = Proofs(request.job, request.trainer, candidate, versions)
        recorded = proofs.find()
        if isinstance(recorded, Proof):
            proof = recorded
            missed = None
        else:
            missed = recorded
            listener(Note(text=f"Not on record: {missed}. Measuring its worst case."))
            trial = _measured(request.job, candidate, versions, executor, listener)
            to_the_limit = replace(request.job, headroom=NO_HEADROOM)
            proof = proofs.keep(trial, certificate_row(to_the_limit, trial) or {})

    # 3. The file to train with.
    checked = Preflight(
        job=request.job,
        candidate=candidate,
        proof=proof,
        from_record=missed is None,
        missed=missed,
        tuned=None,
        use=None,
        elapsed_seconds=0.0,
    )
    if checked.fits:
        checked = replace(checked, use=request.job.task.workload.config_file)
    elif checked.fits is False and tune:
        search = _search_that_learns_the_same(
            sources,
            request,
            candidate,
            study=f"preflight-{proofs.key}",
            limited=bool(launcher),
        )
        checked = _tuned(checked, search, listener)
    return replace(checked, elapsed_seconds=time.monotonic() - start)


def _refuse_another_number_of_processes(job: Job) -> None:
    """Refuse a file that starts another number of processes than is proven."""
    processes = job.task.workload.user_settings.get("num_processes")
    hardware = job.task.hardware
    if isinstance(processes, int) and processes != hardware.count:
        devices = "cpu" if hardware.kind == "cpu" else "local"
        raise BadInput(
            f"The configuration starts {counted(processes, 'process', 'processes')}, but"
            f" {hardware} has {counted(hardware.count, 'device')}.",
            way_out=f"Type --gpus {processes}x{devices}, or correct num_processes.",
        )


def launcher_bytes(job: Job, versions: Mapping[str, str]) -> int:
    """Return what `trl grpo` itself holds on the first GPU, since it initialises CUDA; a probe
    has no such process.
    """
    hardware = job.task.hardware
    torch = versions.get("torch")
    if hardware.kind != "cuda" or torch is None or Version(torch) < TORCH_OF_LAUNCHER_CONTEXT:
        return 0
    return round(catalog.bare_context(gpu_of(hardware)).value)


def _launcher_note(held_bytes: int) -> str:
    return (
        f"{format_bytes(held_bytes)} of the limit are left for the process of `trl`, which holds a"
        " CUDA context."
    )


def _at_its_longest(request: ParsedRequest, versions: Mapping[str, str]) -> ParsedRequest:
    """Set the longest prompt of the data unless given: TRL truncates no prompt."""
    if PROMPT_KNOB in request.job.task.workload.held_values:
        return request
    longest = longest_prompt(request.job, request.trainer, versions)
    return hold_longest_prompt(request, longest)


def _measured(
    job: Job,
    candidate: Candidate,
    versions: Mapping[str, str],
    executor: Executor,
    listener: Listener,
) -> Trial:
    """Probe the worst case. The measurement is stored for later searches, too."""
    record = Record(job, versions).storing_probes(listener)
    record(
        ProbeStarted(
            number=0,
            purpose="confirm",
            candidate=candidate,
            loads=True,
            seconds_left=PROOF.deadline_seconds,
        )
    )
    measurement = _proof(candidate, executor, listener)
    trial = Trial(
        number=0,
        purpose="confirm",
        candidate=candidate,
        measurement=measurement,
        verdict=judge(measurement),
    )
    record(
        ProbeEnded(
            trial=trial,
            best=trial if trial.verdict.fits else None,
            seconds_left=0.0,
        )
    )
    return trial


def _proof(
    candidate: Candidate,
    executor: Executor,
    listener: Listener,
) -> Measurement:
    """Return the measurement, the last of a few tries that something else ended."""
    for attempt in range(MAX_PROBE_TRIES):
        try:
            measurement = executor.open(candidate).measure(candidate, PROOF)
            if not measurement.ended_from_outside:
                break
        except ProbeError as fault:
            if attempt + 1 == MAX_PROBE_TRIES:
                raise
            listener(Note(text=f"{fault} Trying again."))
    return measurement


def _search_that_learns_the_same(
    sources: RequestSources,
    request: ParsedRequest,
    candidate: Candidate,
    *,
    study: str,
    limited: bool,
) -> RequestSources:
    """Return the search with all learning settings held, including the longest prompt.

    Held are those that no flag states. One left at None derives from another one, which must stay
    free. `limited`: room was left for the launcher.
    """
    settings = candidate.settings
    names = {knob.name for knob in request.job.space.learning_knobs(settings)} | {PROMPT_KNOB}
    held_values = {}
    for name in sorted(names):
        value = candidate.knobs.get(name, settings.get(name))
        is_stated = (
            name in request.held_settings
            and request.held_settings[name].origin.source >= Source.HOLD
        )
        if value is not None and not is_stated:
            held_values[name] = value
    limit_bytes = request.job.memory_limit_bytes if limited else None
    return sources.as_search(held_values, study=study, memory_limit_bytes=limit_bytes)


def _tuned(
    checked: Preflight,
    search: RequestSources,
    listener: Listener,
) -> Preflight:
    """Search for another configuration; an earlier study of this preflight is resumed."""
    pinned = frozenset(checked.candidate.settings) | frozenset(checked.job.space.relax)
    answer = run_request(search, listener=listener, pinned=pinned)
    recommendation = answer.recommendation
    is_certified = (
        recommendation is not None
        and recommendation.certificate is not None
        and not recommendation.interrupted
    )
    use = None
    if is_certified:
        use = next((file for file in answer.files if file.stem == RECOMMENDED), None)
    return replace(checked, tuned=answer, use=use)
