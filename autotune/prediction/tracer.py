"""Tracing processes in the training environment, with the trace cache in front of them.

A process is a probe's worker with another adapter: it imports the framework once, forks, and the
fork answers specification after specification. Nothing is measured, so there is no limit, cgroup or
meter. A pool (`tracer_pool`) computes the traces of a space side by side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from autotune.core.errors import CannotPredict, ProbeError, TrainingEnvironmentError
from autotune.core.trace import Trace
from autotune.machine.environment import DECIDING_PACKAGES, ENGINE_PACKAGES
from autotune.prediction.trace_cache import TraceCache, key_of
from autotune.probe.spawn import (
    WORKER_START_SECONDS,
    Spawned,
    Supported,
    WorkFolder,
    end_processes,
    import_hints,
    require_supported,
    spawn,
)
from autotune.worker.protocol import Message

Specification = Mapping[str, object]

IMPORT_TIMEOUT_S = 180.0  # for the import of a framework: a slow disk takes a minute
# For one trace: the largest models take half a minute, busy machines twenty times that.
TRACE_TIMEOUT_S = 900.0

# Without threads, network or device: the specification describes the GPU.
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class _WorkerGone(Exception):
    """The process exited or does not answer."""


class Tracer:
    """Owner of one tracing process, started at the first cache miss."""

    def __init__(
        self,
        python: Path,
        *,
        adapter: str = "trl.step_trace",
        cache: TraceCache | None = None,
        supported: Supported | None = None,
        trace_seconds: float = TRACE_TIMEOUT_S,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """`versions`: package versions, if reported by a process of the same interpreter."""
        self.python = python
        self.traced = 0  # traces computed, without those from the cache
        self._adapter = adapter
        self._cache = cache
        self._supported = dict(supported or {})
        self._trace_seconds = trace_seconds
        self._folder: WorkFolder | None = None
        self._spawned: Spawned | None = None
        self._versions: dict[str, str] | None = None if versions is None else dict(versions)
        self._loaded = False
        self._cancelled = False
        self._requests_sent = 0

    @property
    def versions(self) -> Mapping[str, str]:
        """Installed package versions, from metadata: no framework is imported."""
        if self._versions is None:
            self._start()
        assert self._versions is not None
        return self._versions

    @property
    def pid(self) -> int | None:
        return self._spawned.process.pid if self._spawned else None

    def trace(self, specification: Specification) -> Trace:
        """Return the trace, possibly cached. CannotPredict if the step cannot be traced."""
        trace = self._compute(specification) if self._cache is None else self._cached(specification)
        engines = {}
        for name in ENGINE_PACKAGES:
            if name in self.versions:
                engines[name.removesuffix("-cpu")] = self.versions[name]
        return dataclasses.replace(trace, versions={**trace.versions, **engines})

    def _cached(self, specification: Specification) -> Trace:
        assert self._cache is not None
        versions = dict(self.versions)
        for name in ENGINE_PACKAGES:  # no part of a step
            versions.pop(name, None)
        key = key_of(specification, versions, self._adapter)
        trace = self._cache.get(key)
        if trace is None:
            trace = self._compute(specification)
            self._cache.put(key, trace)
        return trace

    def cancel(self) -> None:
        """End the running request from another thread; its `trace` raises at once."""
        self._cancelled = True
        if self._spawned is not None:
            with contextlib.suppress(OSError):
                self._spawned.process.kill()

    def close(self) -> None:
        """End the process. May be called twice; a later `trace` starts a new one."""
        spawned, self._spawned = self._spawned, None
        folder, self._folder = self._folder, None
        self._loaded = False
        if spawned is not None:
            spawned.wire.close()
            end_processes(spawned)
            spawned.log.close()
        if folder is not None:
            folder.close()

    def _compute(self, specification: Specification) -> Trace:
        try:
            self._ensure_loaded()
            answer = self._request(
                {"do": "measure", "request": dict(specification)}, "measured", self._trace_seconds
            )
        except _WorkerGone as gone:
            last = self._last_log_line()
            self.close()
            raise ProbeError(f"The tracing process {gone}. Its last output: {last}") from None
        except BaseException:
            self.close()  # interrupted: the running request has no reader any more
            raise
        if not answer.get("stays", True):
            self._loaded = False  # the next load forks anew
        if answer["event"] == "failed":
            raise _refusal(answer, specification)
        try:
            trace = msgspec.convert(answer["result"], Trace, str_keys=True)
        except msgspec.ValidationError as error:
            raise ProbeError(
                f"The adapter {self._adapter} returned an invalid trace: {error}."
            ) from error
        self.traced += 1
        return trace

    def _ensure_loaded(self) -> None:
        """Start the process and its imports; replace a process that has exited."""
        spawned = self._spawned
        if spawned is None or spawned.wire.closed or spawned.process.poll() is not None:
            self._start()
        assert self._spawned is not None
        if self._loaded:
            for message in self._spawned.wire.take(0):
                if message.get("event") == "lost":  # the fork exited while it was idle
                    self._loaded = False
        if not self._loaded:
            answer = self._request(
                {"do": "load", "ranks": 1, "load": {}}, "loaded", IMPORT_TIMEOUT_S
            )
            if answer["event"] == "failed":
                raise TrainingEnvironmentError(
                    f"{self.python} cannot trace a training step: {_describe(answer['error'])}."
                )
            self._loaded = True

    def _start(self) -> None:
        self.close()
        reported = [*self._supported, *DECIDING_PACKAGES, *ENGINE_PACKAGES]
        packages = list(dict.fromkeys(reported))
        self._folder = WorkFolder()
        try:
            self._spawned = spawn(self.python, self._adapter, packages, self._folder, _ENVIRONMENT)
            self._versions = dict(
                self._receive("environment", time.monotonic() + WORKER_START_SECONDS)["versions"]
            )
            require_supported(self._supported, self._versions, self.python)
        except _WorkerGone:
            last = self._last_log_line()
            self.close()
            raise TrainingEnvironmentError(
                f"The interpreter {self.python} did not start the training side: {last}. "
                "Pass the Python (3.9 or newer) of your training environment with --python."
            ) from None
        except BaseException:
            self.close()
            raise

    def _request(
        self,
        message: Message,
        expected: str,
        seconds: float,
    ) -> Message:
        assert self._spawned is not None
        self._requests_sent += 1
        if not self._spawned.wire.send({**message, "id": self._requests_sent}):
            raise _WorkerGone("has ended")
        return self._receive(expected, time.monotonic() + seconds, self._requests_sent)

    def _receive(
        self,
        expected: str,
        deadline: float,
        number: int | None = None,
    ) -> Message:
        """Return the expected reply, or the one that reports a failure."""
        assert self._spawned is not None
        wire = self._spawned.wire
        while time.monotonic() < deadline and not self._cancelled:
            messages = wire.take(max(0.0, deadline - time.monotonic()))
            if not messages and wire.closed:
                raise _WorkerGone("has ended")
            for message in messages:
                if number is not None and message.get("id") != number:
                    continue
                if message.get("event") in (expected, "failed"):
                    return message
                self._raise_for(message)
        raise _WorkerGone("was cancelled" if self._cancelled else "gave no answer in time")

    def _raise_for(self, message: Message) -> None:
        """Raise the error that a message reports; return for any other message."""
        if message.get("event") == "unready":
            problem = (
                f"Training environment {self.python}: import failed"
                f" ({_describe(message['error'])[-500:]})."
            )
            hints = import_hints(self.python, message["error"], self._supported)
            raise TrainingEnvironmentError(" ".join([problem, *hints]))
        if message.get("event") == "lost":
            signal = message.get("signal")
            if signal is None:
                raise _WorkerGone(f"ended with status {message.get('exit')}")
            out_of_memory = " (out of memory?)" if signal == 9 else ""
            raise _WorkerGone(f"was ended by signal {signal}{out_of_memory}")

    def _last_log_line(self) -> str:
        if self._spawned is None:
            return "no output"
        with contextlib.suppress(OSError):
            self._spawned.log.settle()
        lines = self._spawned.log.since(0).strip().splitlines()
        return lines[-1][-500:] if lines else "no output"


def _describe(error: Message) -> str:
    return f"{error.get('type')}: {str(error.get('text')).strip()}"


def _refusal(answer: Message, specification: Specification) -> CannotPredict:
    """Return the error, in the words of the tracing side: it names the operation or the module."""
    error = answer["error"]
    model = specification.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    phase = f" in phase {answer['phase']}" if answer.get("phase") else ""
    for link in error.get("chain", [error]):
        if link.get("type") == "Untraceable":
            problem = str(link["text"]).strip()
            return CannotPredict(
                f"The training step of {name} cannot be traced without a GPU{phase}: {problem}"
            )
    return CannotPredict(
        f"The training step of {name} could not be traced{phase}: {_describe(error)}.",
        way_out=(
            "The trainer of the installed release raised this: check the settings that it names."
        ),
    )
