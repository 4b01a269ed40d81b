"""Record of one job in the user's store: stored answer, earlier measurements, new ones."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import autotune
from autotune.core.answer import AnswerSource, Recommendation
from autotune.core.candidate import fingerprint
from autotune.core.events import Event, Listener, ProbeEnded
from autotune.core.hardware import Hardware
from autotune.core.job import Job
from autotune.emulator.build import sources_fingerprint
from autotune.machine import hardware_detection
from autotune.machine.file_stamp import MAX_NAME_LENGTH, stamp
from autotune.search.measurement_store import ANSWERS, SCHEMA, Circumstances, Store, StoredAnswer, StoredTrials


class Record:
    """Store access for one job under the present conditions."""

    def __init__(self, job: Job, versions: Mapping[str, str], store: Store | None = None) -> None:
        self._job, self._versions = job, dict(versions)
        self._store = Store() if store is None else store
        self.here = circumstances(job, versions)

    def answer(self) -> Recommendation | None:
        """Return the stored answer to the same job; None if there is none, or --fresh or --resume is set."""
        job = self._job
        if job.fresh or job.resume:
            return None
        known = self._store.answer(self.here)
        if known is None or not known.serves(budget_seconds=job.budget_seconds, max_probes=job.max_probes):
            return None
        source = AnswerSource(
            when=known.when, where=known.where, versions=self._versions, elapsed_seconds=known.answer.elapsed_seconds
        )
        return replace(known.answer, from_record=source, elapsed_seconds=0.0, probe_seconds=0.0)

    def earlier(self) -> StoredTrials:
        """Return valid measurements of other studies; none with --fresh."""
        return StoredTrials(trials=()) if self._job.fresh else self._store.measured(self.here)

    def storing_probes(self, listener: Listener) -> Listener:
        """Wrap the listener to store every probe at once, so that a killed search loses none."""

        def both(event: Event) -> None:
            # A deadline or a signal is no outcome of the candidate's own.
            if isinstance(event, ProbeEnded) and (event.trial.verdict.fits or event.trial.measurement.outcome.is_out_of_memory):
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
            schema=SCHEMA, when=_now(), where=platform.node(), facts=self.here.facts, budget_seconds=job.budget_seconds,
            max_probes=job.max_probes, answer=answer,
        )  # fmt: skip
        self._store.keep(ANSWERS, self.here.job_key, known)


def circumstances(job: Job, versions: Mapping[str, str]) -> Circumstances:
    """Return the conditions that determine a probe's figures here, and the rest that determines the answer."""
    workload, hardware = job.task.workload, job.task.hardware
    device = {"kind": hardware.kind, "name": hardware.name, "count": hardware.count, "memory_bytes": hardware.memory_bytes}
    facts: dict[str, object] = {
        "autotune": autotune.__version__,
        "model": workload.model.config,
        "weights": [workload.weights, str(workload.model.folder) if workload.weights == "real" else None],
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


ENVIRONMENT_PREFIXES = ("PYTORCH_", "VLLM_", "NCCL_", "CUDA_MODULE_LOADING", "CUDA_DEVICE_MAX_CONNECTIONS", "TORCH_", "XFORMERS_")
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
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [text for part in parts for text in strings_in(part)]


def files_named(*names: str | None) -> dict[str, str]:
    """Return stamps of the files and folders that the job names, modules of rewards included; a new one for an unreadable one."""
    paths = [path for name in names if name and len(name) <= MAX_NAME_LENGTH for path in (name, f"{name.split('.')[0]}.py")]
    return {
        path: stamp(path) or f"unknown {time.time_ns()}"
        for path in paths
        if path.strip() and "\0" not in path and Path(path).exists()
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
