"""A run of one fault: a driver, the fault from outside, and a second driver that resumes the
study.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol

from tests.faults.driver import MARK, Order, as_json, drive
from tests.probe.toys import environment

LONGEST_SECONDS = 600.0
"""A driver that is still there after that hangs; on a machine that others load a search takes
minutes.
"""

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.faults.preloaded"])


class Driver(Protocol):
    """A process that can be ended."""

    @property
    def pid(self) -> int | None: ...

    def kill(self) -> None: ...

    def code(self, seconds: float) -> int | None:
        """Exit code; None where it did not exit in time."""
        ...


class Forked:
    """Off a process that has everything imported: a twentieth of a second."""

    def __init__(self, order: Order) -> None:
        self._process = _SERVER.Process(target=drive, args=(order,))
        self._process.start()
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def code(self, seconds: float) -> int | None:
        self._process.join(seconds)
        return self._process.exitcode


class Started:
    """Start a new interpreter, where its environment must be set beforehand."""

    def __init__(self, order: Order, **variables: str) -> None:
        command = [sys.executable, "-m", "tests.faults.driver", as_json(order)]
        self._process = subprocess.Popen(command, env={**environment(), **variables})
        self.pid = self._process.pid

    def kill(self) -> None:
        self._process.kill()

    def code(self, seconds: float) -> int | None:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None


@dataclass(kw_only=True)
class Scene:
    """Place of a run. `random` decides every moment and every variant."""

    folder: Path
    random: Random
    storage: str
    address: str | None = None
    cluster: Any = None
    server: Any = None
    """A PostgreSQL server, where the study is kept in one."""

    slots: int = 1
    ranks: int = 1
    variables: dict[str, str] = field(default_factory=dict)
    """Additional environment of the drivers."""

    moment: Path
    """Path of the file with the device memory (NVML) of a cluster's nodes."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    driver: Driver | None = None
    closing: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Resources of this run alone."""

    wrong: list[str] = field(default_factory=list)
    """Violations that the fault itself observed."""
    at: int = 1
    """The probe at which it happens, counted from 1 over the whole study."""

    def order(self, name: str, **changes: Any) -> Order:
        plain = Order(
            folder=str(self.folder),
            name=name,
            storage=self.storage,
            mark=self.mark,
            address=self.address,
            slots=self.slots,
            ranks=self.ranks,
            moment=str(self.moment),
        )
        return replace(plain, **changes)

    def start(self, order: Order) -> Driver:
        self.driver = Started(order, **self.variables) if self.variables else Forked(order)
        return self.driver

    def begun(self, rank: int = 0) -> list[dict[str, Any]]:
        """Probes that really began, as the ranks themselves wrote it down."""
        return lines_of(self.folder / f"begun-{rank}")

    def finished(self) -> list[dict[str, Any]]:
        return lines_of(self.folder / "finished-0")

    def events(self, name: str) -> list[dict[str, Any]]:
        return lines_of(self.folder / f"{name}.jsonl")

    def wait_for_probe(self, number: int) -> dict[str, Any] | None:
        """The probe of that number once it began; None where the driver ended before."""
        assert self.driver is not None
        until = time.monotonic() + LONGEST_SECONDS
        while time.monotonic() < until:
            begun = self.begun()
            if len(begun) >= number:
                return begun[number - 1]
            if self.driver.code(0.0) is not None:
                return None
            time.sleep(0.002)
        return None

    def a_moment(self, longest_seconds: float) -> None:
        time.sleep(self.random.uniform(0, longest_seconds))

    def marked(self) -> list[int]:
        """Processes that came of this run, whoever their parent is now."""
        return carrying(
            f"{MARK}={self.mark}", spare={os.getpid(), (self.driver and self.driver.pid) or 0}
        )

    def marked_after(self, seconds: float) -> list[int]:
        """Return the processes that remain after a while."""
        until = time.monotonic() + seconds
        while (pids := self.marked()) and time.monotonic() < until:
            time.sleep(0.02)
        return pids


Act = Callable[[Scene], None]
"""Cause the fault from outside while the driver runs."""


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Whole lines only: the last may be half written."""
    if not file.exists():
        return []
    *lines, _ = file.read_text().split("\n")
    return [json.loads(line) for line in lines]


def carrying(variable: str, spare: set[int]) -> list[int]:
    needle, pids = variable.encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in spare:
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A file system of its own that is soon full. Mounting needs root."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "autotune-faults", str(folder)], check=True
    )
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
