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
from typing import Any, NoReturn

from . import process_memory, processes, protocol
from .phase_recorder import PhaseRecorder
from .protocol import Message, Wire

EXCERPT_BYTES = 4096
MAX_FRAMES = 16
# Growth of a process over a candidate that never causes its replacement.
MIN_TOLERATED_BYTES = 32 * 2**20


def run(
    adapter: ModuleType | Callable[[], ModuleType],
    connection: socket.socket,
    rank: int,
    ranks: int,
    worker: int,
    local: int,
) -> NoReturn:
    """Serve as a rank, the `local`th of its machine. Never returns into the worker's code.

    `adapter` is imported already, or a function that imports it in a rank that is a fresh
    interpreter.
    """
    code = 70
    try:
        processes.exit_with_parent(worker)
        processes.prefer_for_the_oom_killer()
        process_memory.keep_thread_stacks_small()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _Rank(adapter, Wire(connection), rank, ranks, local).serve()
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
        adapter: ModuleType | Callable[[], ModuleType],
        wire: Wire,
        rank: int,
        ranks: int,
        local: int,
    ) -> None:
        self._adapter: Any = adapter
        self._wire, self._rank, self._ranks, self._local = wire, rank, ranks, local
        self._loaded: Any = None
        self._loaded_bytes = 0
        self._headroom_bytes: int | None = None

    def serve(self) -> None:
        stays = True
        while stays and not self._wire.closed:
            for message in self._wire.take():
                if stays and message.get("do") == protocol.LOAD:
                    stays = self._load(message)
                elif stays and message.get("do") == protocol.MEASURE:
                    stays = self._measure(message)

    def _load(self, message: Message) -> bool:
        started = time.monotonic()
        self._send(message, protocol.LOADING, pid=os.getpid())
        recorder, base = self._recorder(message)
        try:
            if not isinstance(self._adapter, ModuleType):
                self._adapter = self._adapter()
                self._adapter.warm(message["load"])
            with process_memory.Guard(message.get("guard_bytes"), message.get("slack_bytes", 0)):
                self._loaded = self._adapter.load(message["load"], recorder)
        except BaseException as error:
            # A half-loaded model is of no use: the next load starts from a fresh fork.
            failure = _describe(error, recorder)
            self._send(
                message,
                protocol.FAILED,
                phase=recorder.phase or "load",
                base_bytes=base,
                stays=False,
                **failure,
            )
            return False
        finally:
            memory = _peaks(recorder)
            recorder.close()
        process_memory.give_back()
        self._loaded_bytes = process_memory.own_bytes()
        growth = message.get("guard_bytes")
        self._headroom_bytes = (
            None if growth is None else max(0, base + growth - self._loaded_bytes)
        )
        self._send(
            message,
            protocol.LOADED,
            pid=os.getpid(),
            seconds=round(time.monotonic() - started, 4),
            world_size=self._ranks,
            bytes=self._loaded_bytes,
            result=memory,
        )
        return True

    def _measure(self, message: Message) -> bool:
        recorder, base = self._recorder(message)
        report: Message
        try:
            with process_memory.Guard(message.get("guard_bytes"), message.get("slack_bytes", 0)):
                result = self._adapter.measure(self._loaded, message["request"], recorder)
            event, report = protocol.MEASURED, {"result": result}
        except BaseException as error:
            event, report = protocol.FAILED, {"phase": recorder.phase, **_describe(error, recorder)}
        finally:
            recorder.close()
        stays = self._recover()
        self._send(message, event, base_bytes=base, stays=stays, **report)
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
        growth = process_memory.own_bytes() - self._loaded_bytes
        return growth <= MIN_TOLERATED_BYTES + self._headroom_bytes // 4

    def _recorder(self, message: Message) -> tuple[PhaseRecorder, int]:
        base, growth = process_memory.own_bytes(), message.get("guard_bytes")
        limit = message.get("device_limit_bytes")
        if limit is None and growth is not None:
            limit = base + max(0, growth)

        def emit(event: Message) -> None:
            self._wire.send({**event, "id": message.get("id"), "rank": self._rank})

        devices = message.get("devices") or []
        device = devices[self._local] if self._local < len(devices) else None
        recorder = PhaseRecorder(
            rank=self._rank,
            world_size=self._ranks,
            local_rank=self._local,
            emit=emit,
            limit_bytes=limit,
            device=device,
        )
        return recorder, base

    def _send(self, command: Message, event: str, **fields: Any) -> None:
        self._wire.send({"event": event, **fields, "id": command.get("id"), "rank": self._rank})


def _describe(error: BaseException, recorder: PhaseRecorder) -> Message:
    """Return the error as JSON. Afterwards it no longer references the tensors of its frames."""
    chain: list[
        BaseException
    ] = []  # the error, its cause, the cause of that and so on, the earliest last
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    innermost = [
        frame
        for link in chain
        for frame in list(traceback.extract_tb(link.__traceback__))[-MAX_FRAMES:]
    ]
    text = {
        "type": type(error).__name__,
        "text": str(error)[-EXCERPT_BYTES:],
        "traceback": lines[-EXCERPT_BYTES:],
        "chain": [
            {"type": type(link).__name__, "text": str(link)[-EXCERPT_BYTES:]} for link in chain
        ],
        "frames": [f"{frame.filename}:{frame.name}" for frame in innermost],
    }
    partial, ended = getattr(error, "partial", None), getattr(error, "ended", None)
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None
    launched = {"ended": ended} if isinstance(ended, dict) else {}
    return {
        "error": text,
        "partial": {**_peaks(recorder), **(partial if isinstance(partial, dict) else {})},
        **launched,
    }


def _peaks(recorder: PhaseRecorder) -> Message:
    """Return the memory figures; none from a device that is broken by now."""
    try:
        return recorder.memory()
    except Exception:
        return {}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
