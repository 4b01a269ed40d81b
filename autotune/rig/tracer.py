"""Asks the training environment to follow a step without a GPU, and keeps what it answers.

The same keeper as a probe's, with another adapter: it imports the framework once, forks one process, and that answers
specification after specification. Nothing is measured here, so there is no limit, no cgroup and no meter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from autotune.errors import CannotPredict, RigError, TrainingEnvironmentError
from autotune.inside.wire import Message
from autotune.rig.folder import RigFolder
from autotune.rig.keeper import START_SECONDS, Supported, end_processes, install_line, require_supported
from autotune.rig.spawn import DECIDING_PACKAGES, Spawned, spawn
from autotune.rig.trace_cache import TraceCache, key_of
from autotune.trace import Trace

IMPORT_SECONDS = 180.0
"""The first import of a framework from a slow disk takes a minute; beyond this it hangs."""

TRACE_SECONDS = 900.0
"""A step of the largest models takes half a minute, and on a machine that many share twenty times that; beyond this it hangs."""

_TAME = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
"""Nothing is computed, nothing is fetched, and no device is touched: what a GPU would do is in the specification."""


class _Lost(Exception):
    """The process ended, or stopped to answer."""


class Tracer:
    """Owner of one tracing process, started when it is first needed."""

    def __init__(
        self,
        python: Path,
        *,
        adapter: str = "trl_trace",
        cache: TraceCache | None = None,
        supported: Supported | None = None,
        trace_seconds: float = TRACE_SECONDS,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        """`versions`, where another process of the same interpreter has told them already."""
        self.python = python
        self.traced = 0
        """Steps that were followed, and not found in the cache."""
        self._adapter, self._cache, self._supported = adapter, cache, dict(supported or {})
        self._trace_seconds = trace_seconds
        self._folder: RigFolder | None = None
        self._spawned: Spawned | None = None
        self._versions: dict[str, str] | None = None if versions is None else dict(versions)
        self._loaded = self._given_up = False
        self._asked = 0

    @property
    def versions(self) -> Mapping[str, str]:
        """What is installed there, by metadata: an interpreter's bare start, no import of a framework."""
        if self._versions is None:
            self._start()
        assert self._versions is not None
        return self._versions

    @property
    def pid(self) -> int | None:
        return self._spawned.process.pid if self._spawned else None

    def trace(self, specification: Mapping[str, object]) -> Trace:
        """The step that was asked for; CannotPredict where it cannot be followed."""
        key = key_of(specification, self.versions, self._adapter) if self._cache else ""
        found = self._cache.get(key) if self._cache else None
        if found is not None:
            return found
        trace = self._followed(specification)
        self.traced += 1
        if self._cache:
            self._cache.put(key, trace)
        return trace

    def expect(self, specifications: Iterable[Mapping[str, object]]) -> None:
        """What will be asked for: nothing to prepare where one process answers one question after the other."""

    def give_up(self) -> None:
        """For another thread than the one that waits for a trace: that one hears at once that there will be none."""
        self._given_up = True
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

    def __enter__(self) -> Tracer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _followed(self, specification: Mapping[str, object]) -> Trace:
        try:
            self._be_loaded()
            answer = self._ask({"do": "measure", "request": dict(specification)}, "measured", self._trace_seconds)
        except _Lost as lost:
            said = self._last_words()
            self.close()
            raise RigError(f"The process that follows the step {lost}; the last that it wrote: {said}") from None
        except BaseException:
            self.close()  # interrupted: whatever it is at, nobody waits for it
            raise
        if not answer.get("stays", True):
            self._loaded = False  # its next load is a fresh fork
        if answer["event"] == "failed":
            raise _refusal(answer, specification)
        try:
            return msgspec.convert(answer["result"], Trace)
        except msgspec.ValidationError as error:
            raise RigError(f"The adapter {self._adapter} answered with what is no trace: {error}.") from error

    def _be_loaded(self) -> None:
        """A live process with its imports; one that was lost meanwhile is replaced."""
        if self._spawned is None or self._spawned.wire.closed or self._spawned.process.poll() is not None:
            self._start()
        if self._loaded:
            self._notice_losses()
        if not self._loaded:
            answer = self._ask({"do": "load", "ranks": 1, "load": {}}, "loaded", IMPORT_SECONDS)
            if answer["event"] == "failed":
                raise TrainingEnvironmentError(f"{self.python} cannot follow a training step: {_words(answer['error'])}.")
            self._loaded = True

    def _notice_losses(self) -> None:
        """The forked process may have ended while nothing was asked of it."""
        assert self._spawned is not None
        if any(message.get("event") == "lost" for message in self._spawned.wire.take(0)):
            self._loaded = False

    def _start(self) -> None:
        self.close()
        packages = list(dict.fromkeys([*self._supported, *DECIDING_PACKAGES]))
        self._folder = RigFolder()
        try:
            self._spawned = spawn(self.python, self._adapter, packages, self._folder, _TAME)
            self._versions = dict(self._heard("environment", time.monotonic() + START_SECONDS)["versions"])
            require_supported(self._supported, self._versions, self.python)
        except _Lost:
            said = self._last_words()
            self.close()
            raise TrainingEnvironmentError(
                f"The interpreter {self.python} did not start the training side: {said}. "
                "Give the Python (3.9 or newer) of your training environment with --python."
            ) from None
        except BaseException:
            self.close()
            raise

    def _ask(self, message: Message, expected: str, seconds: float) -> Message:
        assert self._spawned is not None
        self._asked += 1
        if not self._spawned.wire.send({**message, "id": self._asked}):
            raise _Lost("has ended")
        return self._heard(expected, time.monotonic() + seconds, self._asked)

    def _heard(self, expected: str, deadline: float, number: int | None = None) -> Message:
        """The expected answer, or the word that it failed."""
        assert self._spawned is not None
        wire = self._spawned.wire
        while time.monotonic() < deadline and not self._given_up:
            messages = wire.take(max(0.0, deadline - time.monotonic()))
            if not messages and wire.closed:
                raise _Lost("has ended")
            for message in messages:
                if number is not None and message.get("id") != number:
                    continue
                event = message.get("event")
                if event in (expected, "failed"):
                    return message
                if event == "unready":
                    raise self._cannot_import(message["error"])
                if event == "lost":
                    raise _Lost(_ending(message))
        raise _Lost("was given up" if self._given_up else "gave no answer in time")

    def _cannot_import(self, error: Message) -> TrainingEnvironmentError:
        lines = [install_line(self.python, package, span) for package, span in self._supported.items()]
        what = f"The training environment behind {self.python} cannot be imported ({_words(error)[-500:]})."
        return TrainingEnvironmentError(" ".join([what, *lines]))

    def _last_words(self) -> str:
        if self._spawned is None:
            return "it said nothing"
        with contextlib.suppress(OSError):
            self._spawned.log.settle()
        said = self._spawned.log.since(0).strip().splitlines()
        return said[-1][-500:] if said else "it said nothing"


def _ending(message: Message) -> str:
    if message.get("signal") is not None:
        return f"was ended by signal {message['signal']}" + (" (want of memory?)" if message["signal"] == 9 else "")
    return f"ended with status {message.get('exit')}"


def _words(error: Message) -> str:
    return f"{error.get('type')}: {str(error.get('text')).strip()}"


def _refusal(answer: Message, specification: Mapping[str, object]) -> CannotPredict:
    """What cannot be followed, in the tracing side's words: it names the operation or the module."""
    error = answer["error"]
    model = specification.get("model")
    name = model.get("name") if isinstance(model, Mapping) else None
    where = f" in phase {answer['phase']}" if answer.get("phase") else ""
    untraceable = [link for link in error.get("chain", [error]) if link.get("type") == "Untraceable"]
    words = str(untraceable[0]["text"]).strip() if untraceable else _words(error)
    return CannotPredict(f"The training step of {name} cannot be followed without a GPU{where}: {words}")
