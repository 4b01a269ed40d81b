"""The keeper: imports the framework once, then only forks, passes on what is said, and cleans up.

Forking a rank off a process that has everything imported takes milliseconds where a fresh start takes
ten seconds. The keeper itself never touches a device and never allocates, so it outlives every candidate.
It ends, and takes every process below it along, when its parent's end of the socket is closed: that
happens however the parent ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import select
import socket
import sys
import threading
import time
import traceback
from types import ModuleType
from typing import NoReturn

from . import processes, rank
from .wire import Message, Wire

LOOK_SECONDS = 0.02
"""How often ranks are looked after while some are alive: a death is noticed within this."""


class _Child:
    """One live rank, seen from the keeper."""

    def __init__(self, number: int, pid: int, wire: Wire) -> None:
        self.number, self.pid, self.wire = number, pid, wire


class Keeper:
    """Obeys one parent."""

    def __init__(self, parent: Wire, adapter_name: str) -> None:
        self._parent = parent
        self._adapter_name = adapter_name
        self._adapter: ModuleType | None = None
        self._ranks: list[_Child] = []
        self._own: frozenset[int] = frozenset()
        self._id: int | None = None
        self._asked_ranks = range(0)

    def run(self) -> NoReturn:
        while not self._parent.closed:
            self._wait()
            for message in self._parent.take(0):
                self._obey(message)
            self._relay()
            self._reap()
        self.end()

    def end(self) -> NoReturn:
        """Leave nothing behind."""
        processes.end_descendants()
        os._exit(0)

    def _wait(self) -> None:
        poll = select.poll()
        for wire in [self._parent, *(child.wire for child in self._ranks)]:
            poll.register(wire.fileno(), select.POLLIN)
        poll.poll(LOOK_SECONDS * 1000 if self._ranks else None)

    def _obey(self, message: Message) -> None:
        command = message.get("do")
        self._id = message.get("id", self._id)
        if command == "warm":
            self._warm(message)
        elif command == "load":
            self._end_ranks()
            if self._warm(message):
                self._fork_all(message)
        elif command == "measure":
            for child in self._ranks:
                child.wire.send(message)
            for number in set(self._asked_ranks) - {child.number for child in self._ranks}:
                self._parent.send({"event": "lost", "id": self._id, "rank": number, "signal": None, "exit": None})
        elif command == "unload":
            self._end_ranks()
            self._parent.send({"event": "unloaded", "id": self._id})
        elif command == "quit":
            self.end()

    def _warm(self, message: Message) -> bool:
        if self._adapter is not None:
            return True
        started = time.monotonic()
        try:
            with _EndWhenAlone(self._parent, self.end):
                adapter = _load_adapter(self._adapter_name)
                versions = adapter.warm(message["load"])
        except BaseException as error:
            words = {"type": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()[-rank.EXCERPT_BYTES :]}
            self._parent.send({"event": "unready", "id": self._id, "error": words})
            return False
        self._adapter = adapter
        self._own = frozenset(processes.descendants(os.getpid()))
        gc.collect()
        gc.freeze()  # the collector of a rank then leaves our pages alone, so they stay shared
        self._parent.send(
            {"event": "ready", "pid": os.getpid(), "seconds": round(time.monotonic() - started, 4), "versions": versions}
        )
        return True

    def _fork_all(self, message: Message) -> None:
        """All ranks of a job, or those of it that this machine has: `span` then says where they stand among the others."""
        ranks = int(message["ranks"])
        port = _free_port() if ranks > 1 else None
        span = message.get("span") or {"first": 0, "world": ranks, "address": "127.0.0.1", "port": port}
        self._asked_ranks = range(span["first"], span["first"] + ranks)
        for number in self._asked_ranks:
            self._ranks.append(self._fork(number, ranks, span))
        for child in self._ranks:
            child.wire.send(message)

    def _fork(self, number: int, ranks: int, span: Message) -> _Child:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        keeper = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            return _Child(number, pid, Wire(ours))
        for wire in [self._parent, *(child.wire for child in self._ranks)]:
            wire.close()
        ours.close()
        local, world = number - span["first"], span["world"]
        if world > 1:
            os.environ.update(
                RANK=str(number), LOCAL_RANK=str(local), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR=str(span["address"]), MASTER_PORT=str(span["port"]),
            )  # fmt: skip
        assert self._adapter is not None
        return rank.run(self._adapter, theirs, number, world, keeper, local)

    def _relay(self) -> None:
        for child in self._ranks:
            for message in child.wire.take(0):
                self._parent.send({**message, "rank": child.number})

    def _reap(self) -> None:
        """Bury the dead. A lost rank's last words come first, then the news of its end, then the end of its orphans."""
        for child in list(self._ranks):
            try:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = child.pid, 0
            if pid:
                for message in child.wire.take_rest():
                    self._parent.send({**message, "rank": child.number})
                self._bury(child, status)

    def _bury(self, child: _Child, status: int) -> None:
        self._ranks.remove(child)
        child.wire.close()
        code = os.waitstatus_to_exitcode(status)
        signal_number, exit_code = (-code, None) if code < 0 else (None, code)
        self._parent.send(
            {"event": "lost", "id": self._id, "rank": child.number, "pid": child.pid, "signal": signal_number, "exit": exit_code}
        )
        processes.end_descendants(spare=self._own | {other.pid for other in self._ranks})

    def _end_ranks(self) -> None:
        left = processes.end_descendants(spare=self._own)
        for child in self._ranks:
            child.wire.close()
        self._ranks.clear()
        if left:
            self._parent.send({"event": "stuck", "id": self._id, "pids": left})


class _EndWhenAlone:
    """While the main thread imports, which takes long, notice the parent's end all the same. Over before anything is forked."""

    def __init__(self, parent: Wire, end: object) -> None:
        self._fd, self._end = parent.fileno(), end
        self._over_read, self._over_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        os.close(self._over_write)
        self._thread.join()
        os.close(self._over_read)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        poll.register(self._over_read, 0)
        if any(fd == self._fd for fd, _ in poll.poll()) and callable(self._end):
            self._end()


def _load_adapter(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(f"autotune_inside.adapters.{name}")
    spec = importlib.util.spec_from_file_location("autotune_adapter", name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["autotune_adapter"] = module
    spec.loader.exec_module(module)
    return module


def _installed(packages: list[str]) -> dict[str, str]:
    """Versions by the packages' metadata, without importing any of them. What is absent is absent."""
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main(arguments: list[str]) -> NoReturn:
    parser = argparse.ArgumentParser(prog="autotune/inside")
    parser.add_argument("--adapter", required=True, help="a module of autotune.inside.adapters, or the path of one (.py)")
    parser.add_argument("--packages", default="", help="whose versions to report at once, by comma")
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket")
    options = parser.parse_args(arguments)
    os.set_inheritable(options.fd, False)
    faulthandler.enable(all_threads=False)
    processes.adopt_orphans()
    parent = Wire(socket.socket(fileno=options.fd))
    parent.send(
        {"event": "environment", "pid": os.getpid(), "versions": _installed([p for p in options.packages.split(",") if p])}
    )
    Keeper(parent, options.adapter).run()
