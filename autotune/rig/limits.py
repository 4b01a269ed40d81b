"""The memory limit: one interface, and three things that can enforce it.

A cgroup is the real thing: the kernel counts the whole tree and ends a process of it that goes too far.
Where no cgroup can be had, each rank's own RLIMIT_DATA refuses what is too much (`inside/guard.py`) and the
meter ends the tree that crosses the limit all the same. `best_limit` finds out by trying.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from autotune.errors import RigError
from autotune.inside.processes import descendants
from autotune.rig import cgroups
from autotune.rig.host_memory import HostMemory

_REACHED_BYTES = 4 * 2**20
"""A charge that failed was at most a batch of pages away from the limit."""


class Limit(Protocol):
    """A limit that binds a tree of processes."""

    name: str
    """As a Measurement names it in `bound_by`."""

    kernel_kills: bool
    """Whether the kernel ends a process that goes beyond; otherwise the meter must."""

    def enter(self, pid: int) -> None:
        """Bind this process and all that it will start."""
        ...

    def usage_bytes(self) -> int | None:
        """Anonymous and shared memory of the tree now; None where nobody counts it but the processes themselves."""
        ...

    def ceiling_bytes(self) -> int | None:
        """The most that was ever charged since `reset`, caches included: an upper bound for the peak; None where unknown."""
        ...

    def reset(self) -> None:
        """Begin a new peak."""
        ...

    def oom_kills(self) -> int:
        """How many processes of the tree the kernel has ended for want of memory."""
        ...

    def at_limit(self) -> bool:
        """Whether the tree hit its own limit since `reset` (and not the machine's)."""
        ...

    def kill_all(self) -> None:
        """End every process of the tree."""
        ...

    def close(self) -> None:
        """Let go of what the limit itself holds. May be called twice."""
        ...


class _Cgroup:
    """What both versions do alike: their members are entered, ended and let go through the same files."""

    kernel_kills = True
    _group: cgroups.Group

    def enter(self, pid: int) -> None:
        self._group.write("cgroup.procs", pid)

    def kill_all(self) -> None:
        self._group.kill_all()

    def close(self) -> None:
        self._group.remove()


class CgroupV1(_Cgroup):
    """The memory controller of cgroup v1."""

    name = "cgroup-v1"

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._group = cgroups.Group(cgroups.v1_home())
        try:
            self._group.write("memory.limit_in_bytes", limit_bytes)
            if (self._group.path / "memory.memsw.limit_in_bytes").exists():  # swap must not make it fit
                self._group.write("memory.memsw.limit_in_bytes", limit_bytes)
            self._group.write("memory.oom_control", 0)  # it is inherited; 1 would hang the tree at its limit
            _check(self._group.number("memory.limit_in_bytes") <= limit_bytes, "the limit did not take")
        except BaseException:
            self._group.remove()
            raise

    def usage_bytes(self) -> int | None:
        stat = self._group.table("memory.stat")
        return stat["total_rss"] + stat.get("total_shmem", 0)

    def ceiling_bytes(self) -> int | None:
        return self._group.number("memory.max_usage_in_bytes")

    def reset(self) -> None:
        self._group.write("memory.max_usage_in_bytes", 0)

    def oom_kills(self) -> int:
        return self._group.table("memory.oom_control").get("oom_kill", 0)

    def at_limit(self) -> bool:
        # Not by memory.failcnt: kernels exist (seen: 6.18) that never count it up.
        return self._group.number("memory.max_usage_in_bytes") + _REACHED_BYTES >= self._limit_bytes


class CgroupV2(_Cgroup):
    """The memory controller of cgroup v2."""

    name = "cgroup-v2"

    def __init__(self, limit_bytes: int) -> None:
        self._group = cgroups.Group(cgroups.v2_home())
        self._limited_before = 0
        try:
            self._group.write("memory.max", limit_bytes)
            if (self._group.path / "memory.swap.max").exists():
                self._group.write("memory.swap.max", 0)
            _check(self._group.number("memory.max") <= limit_bytes, "the limit did not take")
        except BaseException:
            self._group.remove()
            raise

    def usage_bytes(self) -> int | None:
        stat = self._group.table("memory.stat")
        return stat["anon"] + stat.get("shmem", 0)

    def ceiling_bytes(self) -> int | None:
        return None  # memory.peak cannot be reset before Linux 6.12

    def reset(self) -> None:
        self._limited_before = self._group.table("memory.events").get("oom", 0)

    def oom_kills(self) -> int:
        return self._group.table("memory.events").get("oom_kill", 0)

    def at_limit(self) -> bool:
        return self._group.table("memory.events").get("oom", 0) > self._limited_before


class Rlimit:
    """No cgroup to be had: the ranks hold themselves to their share, and the meter watches the tree."""

    name = "rlimit"
    kernel_kills = False

    def __init__(self, limit_bytes: int) -> None:
        self._root: int | None = None

    def enter(self, pid: int) -> None:
        self._root = pid

    def usage_bytes(self) -> int | None:
        return None

    def ceiling_bytes(self) -> int | None:
        return None

    def reset(self) -> None:
        """There is nothing to reset."""

    def oom_kills(self) -> int:
        # Counts the whole machine's; whether it was one of ours, the signal that a lost process ended by tells.
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

    def at_limit(self) -> bool:
        return False

    def kill_all(self) -> None:
        if self._root is None:
            return
        for pid in [*descendants(self._root), self._root]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self._root = None


class Device(Rlimit):
    """The GPU's own memory is the limit; nothing of ours binds the host's, and its processes are ended as a tree."""

    name = "device"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._host = HostMemory()

    def oom_kills(self) -> int:
        return self._host.kills()


def best_limit(limit_bytes: int) -> Limit:
    """The strongest limit that works here: each is set up and a real process is put into it."""
    kinds: tuple[Callable[[int], Limit], ...] = (CgroupV2, CgroupV1)
    for kind in kinds:
        with contextlib.suppress(OSError, RigError, KeyError, ValueError):
            limit = kind(limit_bytes)
            try:
                _try(limit)
            except BaseException:
                limit.close()
                raise
            return limit
    return Rlimit(limit_bytes)


def _try(limit: Limit) -> None:
    """Put a process in, see that it is counted, end it through the limit."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as trial:
        try:
            limit.enter(trial.pid)
            _check(limit.usage_bytes() is not None, "nothing is counted")
            limit.oom_kills()
            limit.at_limit()
            limit.reset()
            limit.kill_all()
            _check(_wait(trial) == -signal.SIGKILL, "its processes cannot be ended")
        finally:
            trial.kill()


def _wait(process: subprocess.Popen[bytes]) -> int | None:
    deadline = time.monotonic() + 2.0
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    return process.returncode


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RigError(f"This limit does not work here: {otherwise}.")
