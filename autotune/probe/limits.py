"""Memory limit of a process tree: one interface, enforced by cgroup v2, cgroup v1 or rlimit.

Under a cgroup the kernel counts the whole tree and kills a process that exceeds it. Without one, each rank's RLIMIT_DATA
refuses larger allocations (`worker/memory_guard.py`) and the meter kills a tree over the limit. `best_limit` tries each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from autotune.core.errors import ProbeError
from autotune.machine import cgroups
from autotune.machine.host_memory import HostMemory
from autotune.worker.processes import descendants

_REACHED_BYTES = 4 * 2**20  # Pages are charged in batches: a refused charge leaves the usage this close to the limit


class Limit:
    """Limit on a tree of processes. These defaults are those of a limit that counts nothing."""

    name: str  # Name in `Measurement.memory.bound_by`
    kernel_kills = False  # True if the kernel kills a process over the limit; otherwise the meter must

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


class _Cgroup(Limit):
    """Operations that both cgroup versions share."""

    kernel_kills = True
    _group: cgroups.Group

    def enter(self, pid: int) -> None:
        self._group.write("cgroup.procs", pid)

    def kill_all(self) -> None:
        self._group.kill_all()

    def close(self) -> None:
        self._group.remove()


class CgroupV1(_Cgroup):
    """Memory controller of cgroup v1."""

    name = "cgroup-v1"

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._group = cgroups.Group(cgroups.v1_home())
        try:
            self._group.write("memory.limit_in_bytes", limit_bytes)
            if (self._group.path / "memory.memsw.limit_in_bytes").exists():  # swap would let a larger tree fit
                self._group.write("memory.memsw.limit_in_bytes", limit_bytes)
            self._group.write("memory.oom_control", 0)  # inherited; 1 would suspend the tree at its limit
            _check(self._group.number("memory.limit_in_bytes") <= limit_bytes, "the limit was not accepted")
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
        # Not by memory.failcnt: some kernels (6.18) never increment it.
        return self._group.number("memory.max_usage_in_bytes") + _REACHED_BYTES >= self._limit_bytes


class CgroupV2(_Cgroup):
    """Memory controller of cgroup v2. No ceiling: memory.peak has no reset before Linux 6.12."""

    name = "cgroup-v2"

    def __init__(self, limit_bytes: int) -> None:
        self._group = cgroups.Group(cgroups.v2_home())
        self._limited_before = 0
        try:
            self._group.write("memory.max", limit_bytes)
            if (self._group.path / "memory.swap.max").exists():
                self._group.write("memory.swap.max", 0)
            _check(self._group.number("memory.max") <= limit_bytes, "the limit was not accepted")
        except BaseException:
            self._group.remove()
            raise

    def usage_bytes(self) -> int | None:
        stat = self._group.table("memory.stat")
        return stat["anon"] + stat.get("shmem", 0)

    def reset(self) -> None:
        self._limited_before = self._group.table("memory.events").get("oom", 0)

    def oom_kills(self) -> int:
        return self._group.table("memory.events").get("oom_kill", 0)

    def at_limit(self) -> bool:
        return self._group.table("memory.events").get("oom", 0) > self._limited_before


class Rlimit(Limit):
    """Limit without a cgroup: each rank sets RLIMIT_DATA; the meter kills a tree over the limit."""

    name = "rlimit"

    def __init__(self, limit_bytes: int) -> None:
        self._root: int | None = None

    def enter(self, pid: int) -> None:
        self._root = pid

    def oom_kills(self) -> int:
        # Of the whole machine: the exit signal of a lost process decides if it was ours.
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
        return 0

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

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self._host = HostMemory()

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
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as trial:
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
