"""Record of earlier measurements and answers of this user: one folder of plain JSON, and its use by
one job.

The folder is `$XDG_DATA_HOME/autotune` (`~/.local/share/autotune`), readable by its owner alone. It
may be deleted at any time.

    measurements/KEY.jsonl   one line per probe; KEY hashes the conditions under which a figure is valid:
                             model, method, package versions, device, driver, memory, limit
    answers/KEY.json         answer of a finished study; KEY hashes these conditions and the whole job
    proofs/KEY.json          one configuration, proven to fit or not;  lengths/KEY.json  longest prompt of a dataset

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
from autotune.core.answer import AnswerSource, Recommendation, Trial, plain
from autotune.core.events import Event, Listener, ProbeEnded
from autotune.core.files import FOR_ITS_OWNER, make_private_folder, write_atomically
from autotune.core.job import Hardware, Job
from autotune.core.space import fingerprint
from autotune.emulator.build import sources_fingerprint
from autotune.machine import hardware_detection
from autotune.machine.local_files import MAX_NAME_LENGTH, stamp

SCHEMA = 1
MAX_LINE_BYTES = 256 * 1024
MAX_READ_BYTES = (
    16 * 1024 * 1024
)  # Bytes read from one file; a longer one is read from its end, which is the newest part
ANSWERS = "answers"
MAX_ANSWER_BYTES = 64 * 1024 * 1024

_Kind = TypeVar("_Kind")


def default_folder() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "autotune"


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


@dataclass(frozen=True, kw_only=True)
class StoredLine:
    """One line of a measurements file."""

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
        self.folder = default_folder() if folder is None else folder

    def append(self, here: Circumstances, trials: Iterable[Trial], *, when: str) -> None:
        """Append measured trials; each line in one write, which allows concurrent studies."""
        lines = [
            msgspec.json.encode(plain(StoredLine(schema=SCHEMA, when=when, trial=trial))) + b"\n"
            for trial in trials
        ]
        with contextlib.suppress(OSError):
            path = self._measurements(here)
            self._make_folder(path.parent)
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                for line in lines:
                    if len(line) <= MAX_LINE_BYTES:
                        os.write(descriptor, line)
            finally:
                os.close(descriptor)

    def measured(self, here: Circumstances) -> StoredTrials:
        """Return all trials measured under these conditions."""
        trials, unreadable = [], 0
        for line in _last_lines(self._measurements(here)):
            known = _read(line, StoredLine) if len(line) <= MAX_LINE_BYTES else None
            if known is None or known.schema != SCHEMA:
                unreadable += 1
            else:
                trials.append(known.trial)
        return StoredTrials(trials=tuple(trials), unreadable=unreadable)

    def keep(self, folder: str, key: str, value: object) -> None:
        """Write one value under its key, replacing an earlier one."""
        with contextlib.suppress(OSError):
            path = self.folder / folder / f"{key}.json"
            self._make_folder(path.parent)
            write_atomically(path, msgspec.json.encode(plain(value)), mode=FOR_ITS_OWNER)

    def kept(self, folder: str, key: str, kind: type[_Kind]) -> _Kind | None:
        """Return the stored value; None if it is absent or unreadable."""
        return self._read_file(self.folder / folder / f"{key}.json", kind)

    def newest(self, folder: str, kind: type[_Kind], most: int) -> tuple[_Kind, ...]:
        """Return the latest values of a folder, newest first."""
        try:
            files = sorted(
                (self.folder / folder).glob("*.json"), key=lambda file: -file.stat().st_mtime
            )[:most]
        except OSError:
            return ()
        return tuple(found for file in files if (found := self._read_file(file, kind)) is not None)

    def _make_folder(self, folder: Path) -> None:
        for each in (self.folder, folder):
            make_private_folder(each)

    @staticmethod
    def _read_file(path: Path, kind: type[_Kind]) -> _Kind | None:
        try:
            return (
                _read(path.read_bytes(), kind) if path.stat().st_size <= MAX_ANSWER_BYTES else None
            )
        except OSError:
            return None

    def _measurements(self, here: Circumstances) -> Path:
        return self.folder / "measurements" / f"{here.key}.jsonl"


def _read(text: bytes, kind: type[_Kind]) -> _Kind | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def _last_lines(path: Path) -> Sequence[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - MAX_READ_BYTES)
            file.seek(start)
            lines = file.read(MAX_READ_BYTES).split(b"\n")
    except OSError:
        return ()
    whole = lines[1:] if start else lines  # the first line may be cut
    return [line for line in whole if line.strip()]


class Record:
    """Store access for one job under the present conditions."""

    def __init__(self, job: Job, versions: Mapping[str, str]) -> None:
        self._job, self._versions, self._store = job, dict(versions), Store()
        self.here = circumstances(job, versions)

    def answer(self) -> Recommendation | None:
        """Return the stored answer to the same job; None if there is none, or --fresh or
        --resume is set.
        """
        job = self._job
        if job.fresh or job.resume:
            return None
        known = self._store.kept(ANSWERS, self.here.job_key, StoredAnswer)
        if known is None or known.schema != SCHEMA:
            return None
        # One with a smaller budget serves if it was complete: a further search would find no more.
        complete = known.answer.proven in ("no better candidate possible", "stopped improving")
        if not complete and (
            job.budget_seconds > known.budget_seconds or job.max_probes > known.max_probes
        ):
            return None
        source = AnswerSource(
            when=known.when,
            where=known.where,
            versions=self._versions,
            elapsed_seconds=known.answer.elapsed_seconds,
        )
        return replace(known.answer, from_record=source, elapsed_seconds=0.0, probe_seconds=0.0)

    def earlier(self) -> StoredTrials:
        """Return valid measurements of other studies; none with --fresh."""
        return StoredTrials(trials=()) if self._job.fresh else self._store.measured(self.here)

    def storing_probes(self, listener: Listener) -> Listener:
        """Wrap the listener to store every probe at once, so that a killed search loses none."""

        def both(event: Event) -> None:
            # A deadline or a signal is no outcome of the candidate's own.
            if isinstance(event, ProbeEnded) and (
                event.trial.verdict.fits or event.trial.measurement.outcome.is_out_of_memory
            ):
                self._store.append(self.here, [event.trial], when=_now())
            listener(event)

        return both

    def keep_answer(self, answer: Recommendation) -> None:
        """Store a conclusive answer for the same job; an interrupted or empty one is not stored."""
        concluded = answer.winner is not None or answer.proven == "no better candidate possible"
        if not concluded or answer.proven == "not all measured" or answer.interrupted:
            return
        if not answer.trials or answer.from_record is not None:
            return
        job = self._job
        known = StoredAnswer(
            schema=SCHEMA,
            when=_now(),
            where=platform.node(),
            facts=self.here.facts,
            budget_seconds=job.budget_seconds,
            max_probes=job.max_probes,
            answer=answer,
        )
        self._store.keep(ANSWERS, self.here.job_key, known)


def circumstances(job: Job, versions: Mapping[str, str]) -> Circumstances:
    """Return the conditions that determine a probe's figures here, and the rest that determines
    the answer.
    """
    workload, hardware = job.task.workload, job.task.hardware
    device = {
        "kind": hardware.kind,
        "name": hardware.name,
        "count": hardware.count,
        "memory_bytes": hardware.memory_bytes,
    }
    facts: dict[str, object] = {
        "autotune": autotune.__version__,
        "model": workload.model.config,
        "weights": [
            workload.weights,
            str(workload.model.folder) if workload.weights == "real" else None,
        ],
        "method": workload.method,
        "framework": workload.framework,
        "tuning": workload.tuning,
        "versions": dict(versions),
        "device": {**device, "driver": _drivers(hardware)},
        "memory_limit_bytes": job.memory_limit_bytes,
        # Hashed, since a value may be a secret.
        "environment": {
            name: fingerprint({name: value})
            for name, value in sorted(os.environ.items())
            if name.startswith(ENVIRONMENT_PREFIXES)
        },
        "files": files_named(workload.dataset, *strings_in(workload.user_settings)),
    }
    asked = {**job.identity, "seed": workload.seed, "sampler": job.sampler}
    return Circumstances(facts=facts, job=asked)


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


def _drivers(hardware: Hardware) -> str | list[str]:
    """Return what runs the devices; an emulated figure is valid for the same emulator alone."""
    if hardware.kind == "cpu":
        return hardware_detection.processor()
    if hardware.emulated:
        return f"emulated {sources_fingerprint()}"
    return sorted({device.driver_version or "unknown" for device in hardware_detection.gpus_here()})


def strings_in(value: object) -> list[str]:
    """Return every string in a nested configuration."""
    if isinstance(value, str):
        return [value]
    parts = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return [text for part in parts for text in strings_in(part)]


def files_named(*names: str | None) -> dict[str, str]:
    """Return stamps of the files and folders that the job names, modules of rewards included; a
    new one for an unreadable one.
    """
    paths = [
        path
        for name in names
        if name and len(name) <= MAX_NAME_LENGTH
        for path in (name, f"{name.split('.')[0]}.py")
    ]
    return {
        path: stamp(path) or f"unknown {time.time_ns()}"
        for path in paths
        if path.strip() and "\0" not in path and Path(path).exists()
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
