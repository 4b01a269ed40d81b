"""One rank: loads once, then measures candidate after candidate, until it is told to end or cannot give its memory back."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from types import ModuleType
from typing import Any, NoReturn

from . import guard, processes
from .wire import Message, Wire

EXCERPT_BYTES = 4096
LEAST_TOLERATED_BYTES = 32 * 2**20


def run(adapter: ModuleType, connection: socket.socket, rank: int, ranks: int, keeper: int, local: int) -> NoReturn:
    """The life of a forked rank, the `local`th of its machine. Never returns into the keeper's code."""
    code = 70
    try:
        processes.die_with_parent(keeper)
        processes.volunteer_for_the_oom_killer()
        guard.keep_thread_stacks_small()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _Rank(adapter, Wire(connection), rank, ranks, local).serve()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the keeper's exit handlers are not ours to run


class _Rank:
    def __init__(self, adapter: ModuleType, wire: Wire, rank: int, ranks: int, local: int) -> None:
        self._adapter = adapter
        self._wire = wire
        self._rank, self._local = rank, local
        self._ranks = ranks
        self._loaded: Any = None
        self._settled_bytes = 0
        self._headroom_bytes: int | None = None

    def serve(self) -> None:
        stays = True
        while stays and not self._wire.closed:
            for message in self._wire.take():
                if stays and message.get("do") == "load":
                    stays = self._load(message)
                elif stays and message.get("do") == "measure":
                    stays = self._measure(message)

    def _load(self, message: Message) -> bool:
        started = time.monotonic()
        self._say(message, event="loading", pid=os.getpid())
        stage, base = self._stage(message)
        try:
            with guard.Guard(message.get("guard_bytes"), message.get("slack_bytes", 0)):
                self._loaded = self._adapter.load(message["load"], stage)
        except BaseException as error:
            # Half a model is nothing to stay for: the next load starts from a fresh fork.
            self._say(
                message, event="failed", phase=stage.phase or "load", base_bytes=base, stays=False, **_describe(error, stage)
            )
            return False
        finally:
            figures = _peaks(stage)
            stage.close()
        guard.give_back()
        self._settled_bytes = guard.own_bytes()
        growth = message.get("guard_bytes")
        self._headroom_bytes = None if growth is None else max(0, base + growth - self._settled_bytes)
        seconds = round(time.monotonic() - started, 4)
        self._say(
            message, event="loaded", pid=os.getpid(), seconds=seconds, world_size=self._ranks, bytes=self._settled_bytes,
            result=figures,
        )  # fmt: skip
        return True

    def _measure(self, message: Message) -> bool:
        stage, base = self._stage(message)
        report: Message
        try:
            with guard.Guard(message.get("guard_bytes"), message.get("slack_bytes", 0)):
                result = self._adapter.measure(self._loaded, message["request"], stage)
            report = {"event": "measured", "result": result}
        except BaseException as error:
            report = {"event": "failed", "phase": stage.phase, **_describe(error, stage)}
        finally:
            stage.close()
        stays = self._recover()
        self._say(message, base_bytes=base, stays=stays, **report)
        return stays

    def _recover(self) -> bool:
        """Give back what the last measure left; False where that did not work and this process is spoilt."""
        try:
            if self._adapter.release(self._loaded) is False:
                return False
        except BaseException:
            traceback.print_exc()
            return False
        guard.give_back()
        if self._headroom_bytes is None:
            return True
        kept = guard.own_bytes() - self._settled_bytes
        return kept <= LEAST_TOLERATED_BYTES + self._headroom_bytes // 4

    def _stage(self, message: Message) -> tuple[Any, int]:
        from .stage import Stage

        base, growth = guard.own_bytes(), message.get("guard_bytes")
        limit = message.get("device_limit_bytes")
        if limit is None and growth is not None:
            limit = base + max(0, growth)

        def emit(event: Message) -> None:
            self._say(message, **event)

        devices = message.get("devices") or []
        device = devices[self._local] if self._local < len(devices) else None
        return Stage(rank=self._rank, world_size=self._ranks, emit=emit, limit_bytes=limit, device=device), base

    def _say(self, about: Message, **what: Any) -> None:
        self._wire.send({**what, "id": about.get("id"), "rank": self._rank})


def _describe(error: BaseException, stage: Any) -> Message:
    """The error in words; afterwards nothing of it holds on to the tensors of the frames it passed."""
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    words = {
        "type": type(error).__name__,
        "text": str(error)[-EXCERPT_BYTES:],
        "traceback": lines[-EXCERPT_BYTES:],
        "chain": [{"type": type(link).__name__, "text": str(link)[-EXCERPT_BYTES:]} for link in _chain(error)],
        "frames": [f"{frame.filename}:{frame.name}" for link in _chain(error) for frame in _innermost(link)],
    }
    partial, ended = getattr(error, "partial", None), getattr(error, "ended", None)
    _let_go(error)
    launched = {"ended": ended} if isinstance(ended, dict) else {}
    return {"error": words, "partial": {**_peaks(stage), **(partial if isinstance(partial, dict) else {})}, **launched}


def _peaks(stage: Any) -> Message:
    """Where memory stood; a device that is broken by now may not tell."""
    try:
        peaks: Message = stage.memory()
    except Exception:
        return {}
    return peaks


def _innermost(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))[-16:]


def _let_go(error: BaseException) -> None:
    for link in _chain(error):
        traceback.clear_frames(link.__traceback__)
        link.__traceback__ = None


def _chain(error: BaseException) -> list[BaseException]:
    """The error, what caused it, what caused that: the earliest last."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain
