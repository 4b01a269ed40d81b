"""Preflight check: proves that a configuration fits here, or searches for one that does.

    found = preflight("train.yaml", tune=True)
    if found.use is not None:
        subprocess.run(["trl", "grpo", "--config", str(found.use)])

The answer comes from the record if the same was measured under the same circumstances, else from
one short worst-case probe.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack

from packaging.version import Version

from autotune import catalog, frameworks
from autotune.api import RunAnswer, run_flags
from autotune.core.answer import Trial
from autotune.core.errors import BadInput, ProbeError
from autotune.core.events import JobStarted, Listener, Note, ProbeEnded, ProbeStarted, ignore_events
from autotune.core.job import Job
from autotune.core.measurement import judge
from autotune.core.space import Candidate
from autotune.core.units import format_bytes
from autotune.frameworks.shares_in_files import limit_notes, with_limit
from autotune.machine.hardware_detection import gpu_of
from autotune.preflight.proofs import PROOF, Proof, Proofs, decided, longest_prompt
from autotune.probe.executors import open_executor
from autotune.probe.executors.base import Executor
from autotune.report.certificate import certificate_row
from autotune.request.assignments import held_by
from autotune.request.flags import CommonOptions, Flags, flags_of
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request
from autotune.search.record import Record

SCHEMA = 1
RECOMMENDED = "recommended"

Status = Literal["fits", "tuned", "does_not_fit", "nothing_fits", "undecided", "interrupted"]
"""`tuned`: another configuration was found and certified; `nothing_fits`: none was; `undecided`:
the probe failed for another reason than memory, or the budget ended before the best candidate
was certified.
"""

MAX_TRIES = 2  # Attempts after faults of the machine
TORCH_OF_LAUNCHER_CONTEXT = Version(
    "2.8"
)  # The first in which `torch.cuda.set_device(0)` makes a context (issue 155668)


@dataclass(frozen=True, kw_only=True)
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
        answer = None if self.tuned is None else self.tuned.recommendation
        if self.tuned is None or answer is None:
            return "does_not_fit"
        if answer.interrupted:
            return "interrupted"
        if answer.winner is None:
            return (
                "nothing_fits" if self.tuned.document["status"] == "nothing_fits" else "undecided"
            )
        return "undecided" if self.use is None else "tuned"

    @property
    def document(self) -> dict[str, Any]:
        trial, proof = self.proof.trial, self.proof
        memory = trial.measurement.memory
        return {
            "schema": SCHEMA,
            "status": self.status,
            "fits": self.fits,
            "basis": "measured",
            "config": str(self.job.task.workload.config_file),
            "use": None if self.use is None else str(self.use),
            "outcome": str(trial.measurement.outcome),
            "why": trial.verdict.why,
            "peak_memory_bytes": memory.peak_bytes,
            "limit_bytes": memory.limit_bytes,
            "margin_bytes": trial.verdict.margin_bytes,
            "settings": dict(self.candidate.settings),
            "certificate": proof.certificate,
            "from_record": {"when": proof.when, "where": proof.where} if self.from_record else None,
            "missed": self.missed,
            "tuned": None if self.tuned is None else dict(self.tuned.document),
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
    ours = {"config": str(config), "out": str(out), "budget": budget, "fresh": fresh}
    # No other flags: the proof must refer to the file.
    flags = flags_of({**options, **ours}, known={*CommonOptions.__annotations__, *ours})
    return preflight_flags(flags, tune=tune, listener=listener)


def preflight_flags(
    flags: Flags, *, tune: bool = False, listener: Listener = ignore_events
) -> Preflight:
    began = time.monotonic()
    flags = flags.replace(mode="probe")
    request = parse_request(flags)
    _refuse_another_number_of_processes(request.job)
    with contextlib.closing(open_executor(request.job, request.trainer)) as executor:
        versions = executor.prepare()
        request = _at_its_longest(request, versions)
        if beside := launcher_bytes(request.job, versions):
            listener(
                Note(
                    text=(
                        f"{format_bytes(beside)} of the limit are left for the process of `trl`,"
                        " which holds a CUDA context."
                    )
                )
            )
            request = dataclasses.replace(request, job=with_room(request.job, beside))
            flags = flags.replace(memory_limit=f"{request.job.memory_limit_bytes}B")
        candidate = candidate_of_job(request)
        listener(
            JobStarted(
                job=request.job,
                candidates=(candidate,),
                assumed=request.assumed,
                notes=(*request.notes, *limit_notes(request.job, (candidate,))),
            )
        )
        proofs = Proofs(request.job, request.trainer, candidate, versions)
        found = proofs.find()
        missed = found if isinstance(found, str) else None
        if isinstance(found, str):
            listener(Note(text=f"Not on record: {found}. Measuring its worst case."))
            trial = _measured(request.job, candidate, versions, executor, listener)
            found = proofs.keep(trial, certificate_row(request.job, trial) or {})
    known = Preflight(
        job=request.job,
        candidate=candidate,
        proof=found,
        from_record=missed is None,
        missed=missed,
        tuned=None,
        use=None,
        elapsed_seconds=0.0,
    )
    if known.fits is False and tune:
        known = _tuned(known, flags, f"preflight-{proofs.key}", listener)
    elif known.fits:
        known = dataclasses.replace(known, use=Path(str(flags.config)))
    return dataclasses.replace(known, elapsed_seconds=time.monotonic() - began)


def _refuse_another_number_of_processes(job: Job) -> None:
    """Refuse a file that starts another number of processes than is proven."""
    named, hardware = job.task.workload.user_settings.get("num_processes"), job.task.hardware
    if isinstance(named, int) and named != hardware.count:
        what = "cpu" if hardware.kind == "cpu" else "local"
        raise BadInput(
            f"The configuration starts {named} processes, and {hardware} are {hardware.count}.",
            way_out=f"Type --gpus {named}x{what}, or correct num_processes.",
        )


def launcher_bytes(job: Job, versions: Mapping[str, str]) -> int:
    """Return what `trl grpo` itself holds on the first GPU, since it initialises CUDA; a probe
    has no such process.
    """
    hardware, torch = job.task.hardware, versions.get("torch")
    if hardware.kind != "cuda" or torch is None or Version(torch) < TORCH_OF_LAUNCHER_CONTEXT:
        return 0
    return round(catalog.bare_context(gpu_of(hardware)).value)


def with_room(job: Job, taken_bytes: int) -> Job:
    """Lower the limit so that other processes can take so much of what CUDA offers of the
    device.
    """
    hardware = job.task.hardware
    offered = round(catalog.offered(hardware.memory_bytes, gpu_of(hardware)).value)
    limit_bytes = max(1, min(job.memory_limit_bytes, offered) - taken_bytes)
    workload = job.task.workload
    fields = frameworks.trainer(workload.framework, workload.method).fields()
    return with_limit(job, limit_bytes, fields)


def _at_its_longest(request: ParsedRequest, versions: Mapping[str, str]) -> ParsedRequest:
    """Set the longest prompt of the data unless given: TRL truncates no prompt."""
    job = request.job
    workload = job.task.workload
    if "max_prompt_length" in workload.held:
        return request
    longest = longest_prompt(job, request.trainer, versions)
    held = {**workload.held, "max_prompt_length": longest}
    task = dataclasses.replace(job.task, workload=dataclasses.replace(workload, held=held))
    return dataclasses.replace(request, job=dataclasses.replace(job, task=task))


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
    for attempt in range(MAX_TRIES):
        try:
            measurement = executor.open(candidate).measure(candidate, PROOF)
            if not measurement.ended_from_outside:
                break
        except ProbeError as fault:
            if attempt + 1 == MAX_TRIES:
                raise
            listener(Note(text=f"{fault} Trying again."))
    trial = Trial(
        number=0,
        purpose="confirm",
        candidate=candidate,
        measurement=measurement,
        verdict=judge(measurement),
    )
    record(ProbeEnded(trial=trial, best=trial if trial.verdict.fits else None, seconds_left=0.0))
    return trial


def _tuned(known: Preflight, flags: Flags, study: str, listener: Listener) -> Preflight:
    """Search with all learning settings held, including the longest prompt."""
    # 1. Hold those that no flag gives. One left at None derives from another one, which must stay free.
    settings, space = known.candidate.settings, known.job.space
    given = held_by(flags, frameworks.trainer(flags.framework, flags.method).canonical)
    names = {knob.name for knob in space.learning_knobs(settings)} | {"max_prompt_length"}
    learned = {
        name: known.candidate.knobs.get(name, settings.get(name))
        for name in sorted(names - set(given))
    }
    hold = [f"{name}={json.dumps(value)}" for name, value in learned.items() if value is not None]
    # 2. Resume an earlier study of this preflight: nothing is measured twice.
    search = flags.replace(
        hold=(*flags.hold, *hold), study=flags.study or study, resume=not flags.fresh
    )
    found = run_flags(
        search, listener=listener, pinned=frozenset(settings) | frozenset(space.relax)
    )
    answer = found.recommendation
    certified = answer is not None and answer.certificate is not None and not answer.interrupted
    use = next((file for file in found.files if file.stem == RECOMMENDED), None)
    return dataclasses.replace(known, tuned=found, use=use if certified else None)
