"""Worker process: imports the framework once, then forks ranks and relays their messages.

A fork with all imports done takes milliseconds; a fresh start takes ten seconds. The worker never
touches a device and never allocates, so it outlives every candidate. If an import initialised CUDA,
forked ranks could not use it: the worker then restarts without imports, and each rank is a fresh
interpreter. When the parent's end of the socket closes, the worker ends all processes below it and
exits.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import importlib.util
import os
import platform
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

from . import cuda_before_fork, processes, protocol, rank, releases
from .library_imports import kept_imports
from .protocol import Message, Wire

RANK_POLL_S = 0.02  # delay until the exit of a rank is noticed, at most


class _LiveRank(NamedTuple):
    number: int
    pid: int
    wire: Wire


class Worker:
    """The worker: executes the parent's commands, and relays the messages of its ranks."""

    def __init__(
        self,
        parent: Wire,
        adapter_name: str,
        *,
        spawns: bool = False,
    ) -> None:
        """`spawns`: start each rank as a fresh interpreter instead of a fork."""
        self._parent = parent
        self._adapter_name = adapter_name
        self._spawns = spawns
        self._environment = dict(os.environ)
        self._adapter: ModuleType | None = None
        self._ranks: list[_LiveRank] = []
        self._expected_ranks = range(0)
        self._helpers: frozenset[int] = frozenset()  # processes that the imports started
        self._id: int | None = None  # of the current command

    def run(self) -> NoReturn:
        while not self._parent.closed:
            poll = select.poll()
            for wire in self._wires():
                poll.register(wire.fileno(), select.POLLIN)
            poll.poll(RANK_POLL_S * 1000 if self._ranks else None)
            for message in self._parent.take(0):
                # Under its own command's number: what exited before this command did not fail in
                # it.
                self._reap()
                self._execute(message)
            for live in self._ranks:
                self._relay(live, live.wire.take(0))
            self._reap()
        self.end()

    def end(self) -> NoReturn:
        """End all processes below this one, and exit."""
        processes.end_descendants()
        os._exit(0)

    # Messages.

    def _wires(self) -> list[Wire]:
        return [self._parent, *(live.wire for live in self._ranks)]

    def _send(self, event: str, **fields: object) -> None:
        self._parent.send({"event": event, "id": self._id, **fields})

    def _relay(self, live: _LiveRank, messages: list[Message]) -> None:
        for message in messages:
            self._parent.send({**message, "rank": live.number})

    def _execute(self, message: Message) -> None:
        command = message.get("do")
        self._id = message.get("id", self._id)
        if command == protocol.WARM:
            self._warm(message)
        elif command == protocol.LOAD:
            self._end_ranks()
            if self._warm(message):
                self._start_ranks(message)
        elif command == protocol.MEASURE:
            self._measure(message)
        elif command == protocol.UNLOAD:
            self._end_ranks()
            self._send(protocol.UNLOADED)
        elif command == protocol.QUIT:
            self.end()

    def _measure(self, message: Message) -> None:
        """Pass the command on, and report the ranks that exited since the load."""
        for live in self._ranks:
            live.wire.send(message)
        live_numbers = {live.number for live in self._ranks}
        for number in set(self._expected_ranks) - live_numbers:
            self._send(
                protocol.LOST,
                rank=number,
                signal=None,
                exit=None,
            )

    # Imports.

    def _warm(self, message: Message) -> bool:
        """Import everything that the load needs. Return False after a failure."""
        if self._adapter is not None or self._spawns:
            return True
        # 1. Import.
        started = time.monotonic()
        try:
            with _EndOnHangup(self._parent, self.end), kept_imports():
                adapter = load_adapter(self._adapter_name)
                versions = adapter.warm(message["load"])
        except BaseException as error:
            self._send(protocol.UNREADY, error=_describe(error))
            return False

        # 2. Prepare for forks.
        self._adapter = adapter
        running = processes.descendants(os.getpid())
        self._helpers = frozenset(running)
        gc.collect()
        gc.freeze()  # the collector of a rank skips frozen pages, so they stay shared
        reason = None
        if message["load"].get("device") != "cpu":  # CUDA does not matter to a rank on the CPU
            reason = cuda_before_fork.initialised()

        # 3. Answer.
        self._parent.send(
            {
                "event": protocol.READY,
                "pid": os.getpid(),
                "seconds": round(time.monotonic() - started, 4),
                "versions": versions,
                "afresh": reason,
            }
        )
        self._spawns = reason is not None
        if self._spawns and message["do"] == protocol.WARM:
            self._restart_without_imports()
        return True

    def _restart_without_imports(self) -> NoReturn:
        """Replace this process by one without imports, which frees its memory on a GPU."""
        processes.end_descendants()
        fd = self._parent.fileno()
        os.set_inheritable(fd, True)
        command = _command(self._adapter_name, fd)
        _exec([*command, "--spawn-ranks"], self._environment)

    # Ranks.

    def _start_ranks(self, message: Message) -> None:
        """Start the ranks of this machine; `span` has their position among all ranks of the job."""
        ranks = int(message["ranks"])
        port = rank.free_port() if ranks > 1 else None
        span = message.get("span")
        if not span:
            span = {"first": 0, "world": ranks, "address": "127.0.0.1", "port": port}
        first = span["first"]
        self._expected_ranks = range(first, first + ranks)
        for number in self._expected_ranks:
            self._ranks.append(self._fork(number, ranks, span))
        for live in self._ranks:
            live.wire.send(message)

    def _fork(
        self,
        number: int,
        ranks: int,
        span: Message,
    ) -> _LiveRank:
        worker_end, rank_end = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        worker = os.getpid()
        pid = os.fork()
        if pid:
            rank_end.close()
            return _LiveRank(number, pid, Wire(worker_end))
        # From here on in the child.
        for wire in self._wires():
            wire.close()
        worker_end.close()
        local = number - span["first"]
        place = rank.Place(number, span["world"], local)
        if place.ranks > 1:
            os.environ.update(
                RANK=str(place.rank),
                LOCAL_RANK=str(place.local),
                WORLD_SIZE=str(place.ranks),
                LOCAL_WORLD_SIZE=str(ranks),
                MASTER_ADDR=str(span["address"]),
                MASTER_PORT=str(span["port"]),
            )
        if self._spawns:
            rank_end.set_inheritable(True)
            command = _command(self._adapter_name, rank_end.fileno())
            numbers = (place.rank, place.ranks, worker, place.local)
            _exec([*command, "--rank", *map(str, numbers)], os.environ)
        assert self._adapter is not None
        return rank.run(self._adapter, rank_end, place, worker)

    def _reap(self) -> None:
        """Relay the last messages of each rank that exited, then report its exit, then end its
        orphans.
        """
        for live in list(self._ranks):
            try:
                pid, status = os.waitpid(live.pid, os.WNOHANG)
            except ChildProcessError:
                pid = live.pid
                status = 0
            if not pid:
                continue
            self._relay(live, live.wire.take_rest())
            self._ranks.remove(live)
            live.wire.close()
            code = os.waitstatus_to_exitcode(status)
            self._send(
                protocol.LOST,
                rank=live.number,
                pid=live.pid,
                signal=-code if code < 0 else None,
                exit=code if code >= 0 else None,
            )
            stay = {live.pid for live in self._ranks}
            processes.end_descendants(spare=self._helpers | stay)

    def _end_ranks(self) -> None:
        remaining = processes.end_descendants(spare=self._helpers)
        for live in self._ranks:
            live.wire.close()
        self._ranks.clear()
        if remaining:
            self._send(protocol.STUCK, pids=remaining)


class _EndOnHangup:
    """Watches for the parent's exit during the imports. Ends before anything is forked."""

    def __init__(self, parent: Wire, end: Callable[[], NoReturn]) -> None:
        self._fd, self._end = parent.fileno(), end
        self._done_read, self._done_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        os.close(self._done_write)
        self._thread.join()
        os.close(self._done_read)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        poll.register(self._done_read, 0)
        if any(fd == self._fd for fd, _ in poll.poll()):
            self._end()


def _command(adapter: str, fd: int) -> list[str]:
    program = str(Path(__file__).parent)
    return [sys.executable, program, "--adapter", adapter, "--fd", str(fd)]


def _exec(command: list[str], environment: Mapping[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(command[0], command, environment)


def load_adapter(name: str) -> ModuleType:
    """Import an adapter by module name or by file name."""
    if not name.endswith(".py"):
        return importlib.import_module(f"autotune_worker.{name}")
    spec = importlib.util.spec_from_file_location("autotune_adapter", name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["autotune_adapter"] = module
    spec.loader.exec_module(module)
    return module


def _describe(error: BaseException) -> dict[str, str]:
    """Return an import's error, to be reported while it is handled."""
    return {
        "type": type(error).__name__,
        "text": str(error),
        "traceback": traceback.format_exc()[-rank.EXCERPT_BYTES :],
    }


def main(arguments: list[str]) -> NoReturn:
    options = _parse(arguments)
    os.set_inheritable(options.fd, False)
    faulthandler.enable(all_threads=False)
    connection = socket.socket(fileno=options.fd)
    if options.rank is not None:
        number, ranks, worker, local = options.rank
        import_adapter = partial(load_adapter, options.adapter)
        place = rank.Place(number, ranks, local)
        rank.run(import_adapter, connection, place, worker)
    processes.adopt_orphans()
    parent = Wire(connection)
    if not options.spawn_ranks:
        packages = filter(None, options.packages.split(","))
        package_versions = releases.versions(packages)
        versions = {"python": platform.python_version(), **package_versions}
        parent.send({"event": protocol.ENVIRONMENT_EVENT, "pid": os.getpid(), "versions": versions})
    Worker(parent, options.adapter, spawns=options.spawn_ranks).run()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="autotune/worker")
    parser.add_argument(
        "--adapter",
        required=True,
        help="a module of autotune.worker, or the path of an adapter (.py)",
    )
    parser.add_argument(
        "--packages",
        default="",
        help="packages whose versions are reported first, separated by commas",
    )
    parser.add_argument(
        "--fd",
        type=int,
        required=True,
        help="file descriptor of the inherited socket",
    )
    parser.add_argument(
        "--spawn-ranks",
        action="store_true",
        help="import nothing, and start each rank as a fresh interpreter",
    )
    parser.add_argument(
        "--rank",
        type=int,
        nargs=4,
        metavar=("RANK", "WORLD", "WORKER", "LOCAL"),
        help="run as this rank",
    )
    return parser.parse_args(arguments)
