"""Memory limit of a process tree: one interface, enforced by cgroup v2, cgroup v1 or rlimit.

Under a cgroup the kernel counts the whole tree and kills a process that exceeds it. Without one,
each rank's RLIMIT_DATA refuses larger allocations (`worker/process_memory.py`) and the meter kills
a tree over the limit. `best_limit` tries each.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from autotune.core.errors import ProbeError
from autotune.core.units import MIB
from autotune.machine import host_memory
from autotune.worker.processes import descendants

_PREFIX = "autotune-"
_numbers = itertools.count()

# Pages are charged in batches: a refused charge leaves the usage this close to the limit.
_REACHED_BYTES = 4 * MIB


class Limit:
    """Limit on a tree of processes. These defaults are those of a limit that counts nothing."""

    name: str  # Name in `Measurement.memory.bound_by`

    kernel_kills = False
    """True if the kernel kills a process over the limit; otherwise the meter must."""

    def enter(self, pid: int) -> None:
        """Bind this process and its future descendants."""
        raise NotImplementedError

    def usage_bytes(self) -> int | None:
        """Return the anonymous and shared memory of the tree; None if not counted."""
        return None

    def ceiling_bytes(self) -> int | None:
        """Return the peak charge since `reset`, caches included (an upper bound); None: unknown."""
        return None

    def reset(self) -> None:
        """Reset the peak."""

    def oom_kills(self) -> int:
        """Return the number of processes of the tree that the kernel killed for memory."""
        raise NotImplementedError

    def at_limit(self) -> bool:
        """Return True if the tree reached its own limit since `reset`, not the machine's."""
        return False

    def kill_all(self) -> None:
        """Kill every process of the tree."""
        raise NotImplementedError

    def close(self) -> None:
        """Release the limit's own resources. Idempotent."""
        raise NotImplementedError


class Cgroup(Limit):
    """Cgroup below the one of this process, with its memory controller."""

    kernel_kills = True

    def __init__(self, home: Path, limit_bytes: int) -> None:
        _sweep(home)
        self.path = home / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self._limit_bytes = limit_bytes
        self.path.mkdir()
        try:
            self._set_limit()
        except BaseException:
            self.close()
            raise

    def _set_limit(self) -> None:
        raise NotImplementedError

    def enter(self, pid: int) -> None:
        self._write("cgroup.procs", pid)

    def kill_all(self, patience_seconds: float = 3.0) -> None:
        """Kill all members, including processes that they start meanwhile."""
        deadline = time.monotonic() + patience_seconds
        while (members := self._members()) and time.monotonic() < deadline:
            for pid in members:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def close(self, patience_seconds: float = 2.0) -> None:
        """Remove the cgroup. It stays busy for a moment after its last process has exited."""
        deadline = time.monotonic() + patience_seconds
        while self.path.exists():
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return  # the next cgroup's start removes it
                time.sleep(0.01)

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def _number(self, name: str) -> int:
        return int((self.path / name).read_text())

    def _table(self, name: str) -> dict[str, int]:
        table = {}
        for line in (self.path / name).read_text().splitlines():
            fields = line.split()
            if len(fields) == 2:
                table[fields[0]] = int(fields[1])
        return table

    def _members(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]
        return []


class CgroupV1(Cgroup):
    name = "cgroup-v1"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(host_memory.v1_home(), limit_bytes)

    def _set_limit(self) -> None:
        self._write("memory.limit_in_bytes", self._limit_bytes)
        if (self.path / "memory.memsw.limit_in_bytes").exists():  # swap would let a larger tree fit
            self._write("memory.memsw.limit_in_bytes", self._limit_bytes)
        self._write("memory.oom_control", 0)  # inherited; 1 would suspend the tree at its limit
        _check(
            self._number("memory.limit_in_bytes") <= self._limit_bytes, "the limit was not accepted"
        )

    def usage_bytes(self) -> int | None:
        stat = self._table("memory.stat")
        return stat["total_rss"] + stat.get("total_shmem", 0)

    def ceiling_bytes(self) -> int | None:
        return self._number("memory.max_usage_in_bytes")

    def reset(self) -> None:
        self._write("memory.max_usage_in_bytes", 0)

    def oom_kills(self) -> int:
        return self._table("memory.oom_control").get("oom_kill", 0)

    def at_limit(self) -> bool:
        # Not by memory.failcnt: some kernels (6.18) never increment it.
        return self._number("memory.max_usage_in_bytes") + _REACHED_BYTES >= self._limit_bytes


class CgroupV2(Cgroup):
    """Memory controller of cgroup v2. No ceiling: memory.peak has no reset before Linux 6.12."""

    name = "cgroup-v2"
    _limited_before = 0

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(host_memory.v2_home(), limit_bytes)

    def _set_limit(self) -> None:
        self._write("memory.max", self._limit_bytes)
        if (self.path / "memory.swap.max").exists():
            self._write("memory.swap.max", 0)
        _check(self._number("memory.max") <= self._limit_bytes, "the limit was not accepted")

    def usage_bytes(self) -> int | None:
        stat = self._table("memory.stat")
        return stat["anon"] + stat.get("shmem", 0)

    def reset(self) -> None:
        self._limited_before = self._table("memory.events").get("oom", 0)

    def oom_kills(self) -> int:
        return self._table("memory.events").get("oom_kill", 0)

    def at_limit(self) -> bool:
        return self._table("memory.events").get("oom", 0) > self._limited_before


class Rlimit(Limit):
    """Limit without a cgroup: each rank sets RLIMIT_DATA; the meter kills a tree over the limit."""

    name = "rlimit"

    def __init__(self, limit_bytes: int) -> None:
        self._root: int | None = None

    def enter(self, pid: int) -> None:
        self._root = pid

    def oom_kills(self) -> int:
        # Of the whole machine: the exit signal of a lost process decides if it was ours.
        return host_memory.oom_kills(Path("/proc/vmstat")) or 0

    def kill_all(self) -> None:
        if self._root is None:
            return
        for pid in [*descendants(self._root), self._root]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._root = None


class DeviceLimit(Rlimit):
    """Limit of a GPU probe: the device memory. Host memory is unlimited."""

    name = "device"

    def __init__(self, limit_bytes: int, host: host_memory.HostMemory) -> None:
        super().__init__(limit_bytes)
        self._host = host

    def oom_kills(self) -> int:
        return self._host.kills()


def best_limit(limit_bytes: int) -> Limit:
    """Return the strongest limit that works here: each is tried with a real process."""
    kinds: tuple[Callable[[int], Limit], ...] = (CgroupV2, CgroupV1)
    for kind in kinds:
        with contextlib.suppress(OSError, ProbeError, KeyError, ValueError):
            limit = kind(limit_bytes)
            try:
                _verify(limit)
            except BaseException:
                limit.close()
                raise
            return limit
    return Rlimit(limit_bytes)


def _verify(limit: Limit) -> None:
    """Enter a process, check that it is counted, and kill it through the limit."""
    with subprocess.Popen(
        ["/bin/cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as trial:
        try:
            limit.enter(trial.pid)
            _check(limit.usage_bytes() is not None, "memory is not counted")
            limit.oom_kills()
            limit.at_limit()
            limit.reset()
            limit.kill_all()
            with contextlib.suppress(subprocess.TimeoutExpired):
                trial.wait(timeout=2.0)
            _check(trial.returncode == -signal.SIGKILL, "its processes cannot be killed")
        finally:
            trial.kill()


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProbeError(f"This memory limit does not work here: {otherwise}.")


def _sweep(home: Path) -> None:
    """Remove cgroups of exited owners. The kernel refuses while a process remains inside."""
    for cgroup in home.glob(f"{_PREFIX}*-*"):
        owner = cgroup.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                cgroup.rmdir()
