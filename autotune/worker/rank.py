"""Rank process: loads once, then measures candidates until its memory cannot be freed."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from . import process_memory, processes, protocol
from .abandoned_builds import release_abandoned_builds
from .phase_recorder import PhaseRecorder
from .protocol import Message, Wire

EXCERPT_BYTES = 4096
MAX_FRAMES = 16
# Growth of a process over a candidate that never causes its replacement.
MIN_TOLERATED_BYTES = 32 * 2**20
FAILED_EXIT_CODE = 70  # of a rank that failed outside of a command

ImportAdapter = Callable[[], ModuleType]


class Place(NamedTuple):
    """Place of a rank among all ranks of the job, and on its machine."""

    rank: int
    ranks: int
    local: int  # number among the ranks of its machine


def run(
    adapter: ModuleType | ImportAdapter,
    connection: socket.socket,
    place: Place,
    worker: int,
) -> NoReturn:
    """Serve as a rank. Never returns into the worker's code.

    `adapter` is imported already, or a function that imports it in a rank that is a fresh
    interpreter. `worker` is the process that exits with this one.
    """
    code = FAILED_EXIT_CODE
    try:
        processes.exit_with_parent(worker)
        processes.prefer_for_the_oom_killer()
        process_memory.keep_thread_stacks_small()
        release_abandoned_builds()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _Rank(adapter, Wire(connection), place).serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # skips the exit handlers that were inherited from the worker


class _Rank:
    def __init__(
        self,
        adapter: ModuleType | ImportAdapter,
        wire: Wire,
        place: Place,
    ) -> None:
        self._adapter: Any = adapter
        self._wire = wire
        self._place = place
        self._loaded: Any = None
        self._loaded_bytes = 0
        self._headroom_bytes: int | None = None  # to the limit, after the load

    def serve(self) -> None:
        stays = True
        while stays and not self._wire.closed:
            for message in self._wire.take():
                if stays and message.get("do") == protocol.LOAD:
                    stays = self._load(message)
                elif stays and message.get("do") == protocol.MEASURE:
                    stays = self._measure(message)

    def _load(self, message: Message) -> bool:
        """Load the model. Return False if this process has to be replaced."""
        # 1. Load.
        started = time.monotonic()
        self._send(message, protocol.LOADING_EVENT, pid=os.getpid())
        recorder, base_bytes = self._recorder(message)
        try:
            if not isinstance(self._adapter, ModuleType):
                self._adapter = self._adapter()
                load = message["load"]
                self._adapter.warm(load)
            with _guard(message):
                self._loaded = self._adapter.load(message["load"], recorder)
        except BaseException as error:
            # A half-loaded model is of no use: the next load starts from a fresh fork.
            failure = _describe(error, recorder)
            self._send(
                message,
                protocol.FAILED,
                phase=recorder.phase or "load",
                base_bytes=base_bytes,
                stays=False,
                **failure,
            )
            return False
        finally:
            memory = _peaks(recorder)
            recorder.close()

        # 2. Keep what it takes: later measures are compared with that.
        process_memory.give_back()
        self._loaded_bytes = process_memory.own_bytes()
        self._headroom_bytes = None
        growth_bytes = message.get("guard_bytes")
        if growth_bytes is not None:
            spare_bytes = base_bytes + growth_bytes - self._loaded_bytes
            self._headroom_bytes = max(0, spare_bytes)
        self._send(
            message,
            protocol.LOADED,
            pid=os.getpid(),
            seconds=round(time.monotonic() - started, 4),
            world_size=self._place.ranks,
            bytes=self._loaded_bytes,
            result=memory,
        )
        return True

    def _measure(self, message: Message) -> bool:
        """Measure one candidate. Return False if this process has to be replaced."""
        recorder, base_bytes = self._recorder(message)
        report: Message
        try:
            with _guard(message):
                request = message["request"]
                result = self._adapter.measure(self._loaded, request, recorder)
            event = protocol.MEASURED
            report = {"result": result}
        except BaseException as error:
            event = protocol.FAILED
            report = _describe(error, recorder)
            report = {"phase": recorder.phase, **report}
        finally:
            recorder.close()
        stays = self._recover()
        self._send(message, event, base_bytes=base_bytes, stays=stays, **report)
        return stays

    def _recover(self) -> bool:
        """Free what the last measure left. Return False if this process has to be replaced."""
        try:
            if self._adapter.release(self._loaded) is False:
                return False
        except BaseException:
            traceback.print_exc()
            return False
        process_memory.give_back()
        if self._headroom_bytes is None:
            return True
        growth_bytes = process_memory.own_bytes() - self._loaded_bytes
        return growth_bytes <= MIN_TOLERATED_BYTES + self._headroom_bytes // 4

    def _recorder(self, message: Message) -> tuple[PhaseRecorder, int]:
        """Return the recorder of a command, and the memory of this process before it."""
        base_bytes = process_memory.own_bytes()
        growth_bytes = message.get("guard_bytes")
        limit_bytes = message.get("device_limit_bytes")
        if limit_bytes is None and growth_bytes is not None:
            limit_bytes = base_bytes + max(0, growth_bytes)

        rank, ranks, local = self._place

        def emit(event: Message) -> None:
            self._wire.send({**event, "id": message.get("id"), "rank": rank})

        devices = message.get("devices") or []
        recorder = PhaseRecorder(
            rank=rank,
            world_size=ranks,
            local_rank=local,
            emit=emit,
            limit_bytes=limit_bytes,
            device=devices[local] if local < len(devices) else None,
        )
        return recorder, base_bytes

    def _send(self, command: Message, event: str, **fields: Any) -> None:
        rank = self._place.rank
        command_id = command.get("id")
        self._wire.send({"event": event, **fields, "id": command_id, "rank": rank})


def _guard(message: Message) -> process_memory.Guard:
    growth_bytes = message.get("guard_bytes")
    slack_bytes = message.get("slack_bytes", 0)
    return process_memory.Guard(growth_bytes, slack_bytes)


def _describe(error: BaseException, recorder: PhaseRecorder) -> Message:
    """Return the error as JSON. Afterwards it no longer references the tensors of its frames."""
    chain = _chain(error)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    frames = []
    for link in chain:
        summary = traceback.extract_tb(link.__traceback__)
        for frame in list(summary)[-MAX_FRAMES:]:
            frames.append(f"{frame.filename}:{frame.name}")
    description = {
        **_excerpt(error),
        "traceback": "".join(lines)[-EXCERPT_BYTES:],
        "chain": [_excerpt(link) for link in chain],
        "frames": frames,
    }

    partial = getattr(error, "partial", None)
    ended = getattr(error, "ended", None)
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
    peaks = _peaks(recorder)
    failure: Message = {"error": description, "partial": peaks}
    if isinstance(partial, dict):
        failure["partial"] |= partial
    if isinstance(ended, dict):
        failure["ended"] = ended
    return failure


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error, its cause, the cause of that and so on, the earliest last."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _excerpt(error: BaseException) -> dict[str, str]:
    text = str(error)[-EXCERPT_BYTES:]
    return {"type": type(error).__name__, "text": text}


def _peaks(recorder: PhaseRecorder) -> Message:
    """Return the memory figures; none from a device that is broken by now."""
    try:
        return recorder.memory()
    except Exception:
        return {}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        _host, port = listener.getsockname()
        return int(port)
