"""Record of earlier measurements and answers of this user: one folder of plain JSON, and its use by
one job.

The folder is `$XDG_DATA_HOME/autotune` (`~/.local/share/autotune`), readable by its owner alone. It
may be deleted at any time.

    measurements/KEY.jsonl   one line per probe; KEY hashes the conditions under which a figure is
                             valid: model, method, package versions, device, driver, memory, limit
    answers/KEY.json         answer of a finished study; KEY hashes these conditions and the job
    proofs/KEY.json          one configuration, proven to fit or not
    lengths/KEY.json         longest prompt of a dataset
    guarded/KEY.json         guarded runs of one model, method and hardware (`prediction`)

A line is one write and a file is replaced atomically, so a killed process leaves no partial record.
Unreadable content (truncated, edited, of another schema) is skipped and counted.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec

import autotune
from autotune.core.answer import AnswerSource, Recommendation, Trial
from autotune.core.events import Event, Listener, ProbeEnded
from autotune.core.files import FOR_ITS_OWNER, make_private_folder, write_atomically
from autotune.core.job import Hardware, Job
from autotune.core.plain_data import plain
from autotune.core.space import fingerprint
from autotune.emulator.build import sources_fingerprint
from autotune.machine import hardware_detection
from autotune.machine.local_files import MAX_NAME_LENGTH, record_folder, stamp
from autotune.prediction.guarded_runs import refused_trials

SCHEMA = 1
MAX_RECORD_BYTES = 256 * 1024
# Bytes read from one file; a longer one is read from its end, which is the newest part
MAX_RECORDS_BYTES = 16 * 1024 * 1024
# Ends of a search after which a larger budget finds no more
FINAL_ENDS = ("no better candidate possible", "nothing fits", "stopped improving")
MEASUREMENTS = "measurements"
ANSWERS = "answers"
MAX_ANSWER_BYTES = 64 * 1024 * 1024
ENVIRONMENT_PREFIXES = (
    "PYTORCH_",
    "VLLM_",
    "NCCL_",
    "CUDA_MODULE_LOADING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "TORCH_",
    "XFORMERS_",
)
"""Prefixes of variables that configure allocators, kernels and buffers."""
WRITTEN_SETTINGS = ("folder", "logging_dir", "metrics", "output_dir")
"""Settings that name what a run writes, or the folder around it, which each run changes."""

_Kind = TypeVar("_Kind")


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Conditions under which an earlier measurement is valid."""

    facts: Mapping[str, object]  # Model, method, versions, device, driver, limit
    job: Mapping[str, object]  # Rest of the job: knobs and their choices, dataset, seed

    @property
    def key(self) -> str:
        return fingerprint({"schema": SCHEMA, "facts": self.facts})

    @property
    def job_key(self) -> str:
        return fingerprint({"schema": SCHEMA, "facts": self.facts, "question": self.job})


# 1. The folder.


@dataclass(frozen=True, kw_only=True)
class StoredLine:
    """Line of a measurements file."""

    schema: int
    when: str
    trial: Trial


@dataclass(frozen=True, kw_only=True)
class StoredAnswer:
    """Answer of a finished study."""

    schema: int
    when: str
    where: str  # Host name
    facts: Mapping[str, object]
    budget_seconds: float
    max_probes: int
    answer: Recommendation


@dataclass(frozen=True, kw_only=True)
class StoredTrials:
    """Trials of earlier studies, oldest first."""

    trials: tuple[Trial, ...]
    unreadable: int = 0  # Skipped lines


class Store:
    """Folder of records. An unreadable or read-only folder acts as an empty one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = record_folder() if folder is None else folder

    def append(
        self,
        conditions: Circumstances,
        trials: Iterable[Trial],
        *,
        when: str,
    ) -> None:
        """Append measured trials; each line in one write, which allows concurrent studies."""
        lines = []
        for trial in trials:
            line = StoredLine(
                schema=SCHEMA,
                when=when,
                trial=trial,
            )
            lines.append(msgspec.json.encode(plain(line)) + b"\n")
        with contextlib.suppress(OSError):
            path = self._measurements(conditions)
            self._make_folder(path.parent)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, FOR_ITS_OWNER)
            try:
                for encoded in lines:
                    if len(encoded) <= MAX_RECORD_BYTES:
                        os.write(descriptor, encoded)
            finally:
                os.close(descriptor)

    def measured(self, conditions: Circumstances) -> StoredTrials:
        """Return all trials measured under these conditions."""
        trials = []
        unreadable = 0
        for text in _last_lines(self._measurements(conditions)):
            line = _read(text, StoredLine) if len(text) <= MAX_RECORD_BYTES else None
            if line is None or line.schema != SCHEMA:
                unreadable += 1
            else:
                trials.append(line.trial)
        return StoredTrials(trials=tuple(trials), unreadable=unreadable)

    def keep(
        self,
        folder: str,
        key: str,
        value: object,
    ) -> None:
        """Write one value under its key, replacing an earlier one."""
        with contextlib.suppress(OSError):
            path = self._path(folder, key)
            self._make_folder(path.parent)
            write_atomically(path, msgspec.json.encode(plain(value)), mode=FOR_ITS_OWNER)

    def kept(
        self,
        folder: str,
        key: str,
        kind: type[_Kind],
    ) -> _Kind | None:
        """Return the stored value; None if it is absent or unreadable."""
        return _read_file(self._path(folder, key), kind)

    def newest(
        self,
        folder: str,
        kind: type[_Kind],
        count: int,
    ) -> tuple[_Kind, ...]:
        """Return the latest values of a folder, newest first."""
        try:
            files = list((self.folder / folder).glob("*.json"))
            files.sort(key=lambda file: -file.stat().st_mtime)
        except OSError:
            return ()
        values = []
        for file in files[:count]:
            value = _read_file(file, kind)
            if value is not None:
                values.append(value)
        return tuple(values)

    def _path(self, folder: str, key: str) -> Path:
        return self.folder / folder / f"{key}.json"

    def _measurements(self, conditions: Circumstances) -> Path:
        return self.folder / MEASUREMENTS / f"{conditions.key}.jsonl"

    def _make_folder(self, folder: Path) -> None:
        make_private_folder(self.folder)
        make_private_folder(folder)


def _read_file(path: Path, kind: type[_Kind]) -> _Kind | None:
    try:
        if path.stat().st_size > MAX_ANSWER_BYTES:
            return None
        return _read(path.read_bytes(), kind)
    except OSError:
        return None


def _read(text: bytes, kind: type[_Kind]) -> _Kind | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _last_lines(path: Path) -> Sequence[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - MAX_RECORDS_BYTES)
            file.seek(start)
            lines = file.read(MAX_RECORDS_BYTES).split(b"\n")
    except OSError:
        return ()
    if start:
        del lines[0]  # it may be cut
    return [line for line in lines if line.strip()]


# 2. Its use by one job.


class Record:
    """Store access for one job under the present conditions."""

    def __init__(self, job: Job, versions: Mapping[str, str]) -> None:
        self._job = job
        self._versions = dict(versions)
        self._store = Store()
        self.here = circumstances(job, versions)

    def answer(self) -> Recommendation | None:
        """Return the stored answer to the same job; None if there is none, if a search with this
        budget would find more, or if --fresh or --resume is set.
        """
        stored = self._stored_answer()
        if stored is None or self._is_unfinished(stored):
            return None
        source = AnswerSource(
            when=stored.when,
            where=stored.where,
            versions=self._versions,
            elapsed_seconds=stored.answer.elapsed_seconds,
        )
        return replace(
            stored.answer,
            from_record=source,
            elapsed_seconds=0.0,
            probe_seconds=0.0,
        )

    def has_unfinished_answer(self) -> bool:
        """Return True if the same job was searched, and this run can go on where that one ended."""
        stored = self._stored_answer()
        return stored is not None and self._is_unfinished(stored)

    def _stored_answer(self) -> StoredAnswer | None:
        if self._job.fresh or self._job.resume:
            return None
        stored = self._store.kept(ANSWERS, self.here.job_key, StoredAnswer)
        return stored if stored is not None and stored.schema == SCHEMA else None

    def _is_unfinished(self, stored: StoredAnswer) -> bool:
        """Return True if the budget ended the search, and this one's allows more: a larger one, or
        the same one for a winner that was not confirmed.
        """
        if stored.answer.proven in FINAL_ENDS:
            return False
        more_time = self._job.budget_seconds > stored.budget_seconds
        more_probes = self._job.max_probes > stored.max_probes
        return more_time or more_probes or stored.answer.certificate is None

    def earlier(self) -> StoredTrials:
        """Return valid measurements of other studies and of guarded runs; none with --fresh."""
        if self._job.fresh:
            return StoredTrials(trials=())
        stored = self._store.measured(self.here)
        refused = refused_trials(self._job, self._versions)
        return replace(stored, trials=(*stored.trials, *refused))

    def storing_probes(self, listener: Listener) -> Listener:
        """Wrap the listener to store every probe at once, so that a killed search loses none."""

        def store_and_forward(event: Event) -> None:
            # A deadline or a signal is no outcome of the candidate's own.
            if isinstance(event, ProbeEnded) and _is_candidates_own(event.trial):
                self._store.append(self.here, [event.trial], when=_now())
            listener(event)

        return store_and_forward

    def keep_answer(self, answer: Recommendation) -> None:
        """Store a conclusive answer for the same job; an interrupted or empty one is not stored."""
        if not _is_conclusive(answer):
            return
        job = self._job
        stored = StoredAnswer(
            schema=SCHEMA,
            when=_now(),
            where=platform.node(),
            facts=self.here.facts,
            budget_seconds=job.budget_seconds,
            max_probes=job.max_probes,
            answer=answer,
        )
        self._store.keep(ANSWERS, self.here.job_key, stored)


def _is_candidates_own(trial: Trial) -> bool:
    return trial.verdict.fits or trial.measurement.outcome.is_out_of_memory


def _is_conclusive(answer: Recommendation) -> bool:
    if answer.interrupted or answer.proven == "not all measured":
        return False
    if not answer.trials or answer.from_record is not None:
        return False
    return answer.winner is not None or answer.proven == "nothing fits"


# 3. Conditions of a measurement.


def circumstances(job: Job, versions: Mapping[str, str]) -> Circumstances:
    """Return the conditions that determine a probe's figures here, and the rest that determines
    the answer.
    """
    # 1. Model, machine and inputs, on which every figure depends.
    workload = job.task.workload
    real_weights = str(workload.model.folder) if workload.weights == "real" else None
    inputs = {}
    for name, setting in workload.user_settings.items():
        if name not in WRITTEN_SETTINGS:
            inputs[name] = setting
    facts: dict[str, object] = {
        "autotune": autotune.__version__,
        "model": workload.model.config,
        "weights": [workload.weights, real_weights],
        "method": workload.method,
        "framework": workload.framework,
        "tuning": workload.tuning,
        "versions": dict(versions),
        "device": _device(job.task.hardware),
        "memory_limit_bytes": job.memory_limit_bytes,
        "environment": _environment(),
        "files": files_named(workload.dataset, *strings_in(inputs)),
    }

    # 2. What was asked of the search.
    question = {
        **job.identity,
        "seed": workload.seed,
        "sampler": job.sampler,
        "headroom": plain(job.headroom),
    }
    return Circumstances(facts=facts, job=question)


def _device(hardware: Hardware) -> dict[str, object]:
    return {
        "kind": hardware.kind,
        "name": hardware.name,
        "count": hardware.count,
        "memory_bytes": hardware.memory_bytes,
        "driver": _drivers(hardware),
    }


def _environment() -> dict[str, str]:
    """Return the relevant variables, hashed, since a value may be a secret."""
    environment = {}
    for name, value in sorted(os.environ.items()):
        if name.startswith(ENVIRONMENT_PREFIXES):
            environment[name] = fingerprint({name: value})
    return environment


def _drivers(hardware: Hardware) -> str | list[str]:
    """Return what runs the devices; an emulated figure is valid for the same emulator alone."""
    if hardware.kind == "cpu":
        return hardware_detection.processor()
    if hardware.emulated:
        return f"emulated {sources_fingerprint()}"
    if hardware.rehearsed:
        return f"rehearsed {sources_fingerprint()}"
    return sorted({device.driver_version or "unknown" for device in hardware_detection.gpus_here()})


def strings_in(value: object) -> list[str]:
    """Return every string in a nested configuration."""
    if isinstance(value, str):
        return [value]
    parts: Iterable[object] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    strings = []
    for part in parts:
        strings += strings_in(part)
    return strings


def files_named(*names: str | None) -> dict[str, str]:
    """Return stamps of the files and folders that the job names, modules of rewards included; a
    new one for an unreadable one. A folder around the working folder, which every run writes to,
    is left out.
    """
    working = Path.cwd()
    around = (working, *working.parents)
    stamps = {}
    for name in names:
        if not name or len(name) > MAX_NAME_LENGTH:
            continue
        module = f"{name.split('.')[0]}.py"
        for path in (name, module):
            if not path.strip() or "\0" in path or Path(path).resolve() in around:
                continue
            if Path(path).exists():
                stamps[path] = stamp(path) or f"unknown {time.time_ns()}"
    return stamps


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
