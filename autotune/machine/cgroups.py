"""Memory cgroups: location, creation, access and removal."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

from autotune.core.errors import ProbeError

_PREFIX = "autotune-"
MOUNTS = Path("/proc/self/mountinfo")
_numbers = itertools.count()


class Group:
    """Cgroup below the one of this process."""

    def __init__(self, home: Path) -> None:
        _sweep(home)
        self.path = home / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self.path.mkdir()

    def write(self, name: str, value: int) -> None:
        (self.path / name).write_text(str(value))

    def number(self, name: str) -> int:
        return int((self.path / name).read_text())

    def table(self, name: str) -> dict[str, int]:
        pairs = (line.split() for line in (self.path / name).read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}

    def members(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(line) for line in (self.path / "cgroup.procs").read_text().split()]
        return []

    def kill_all(self, patience_seconds: float = 3.0) -> None:
        """Kill all members, including processes that they start meanwhile."""
        deadline = time.monotonic() + patience_seconds
        while (members := self.members()) and time.monotonic() < deadline:
            for pid in members:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)

    def remove(self, patience_seconds: float = 2.0) -> None:
        """Remove the cgroup. It stays busy for a moment after its last process has exited."""
        deadline = time.monotonic() + patience_seconds
        while self.path.exists():
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return  # the next Group removes it
                time.sleep(0.01)


def v1_home() -> Path:
    """Return the v1 memory cgroup of this process."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return place_of(MOUNTS.read_text(), path, "cgroup", "memory")
    raise ProbeError("There is no cgroup v1 memory controller here.")


def v2_own() -> Path:
    """Return the v2 cgroup of this process."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            return place_of(MOUNTS.read_text(), path, "cgroup2", None)
    raise ProbeError("There is no cgroup v2 here.")


def v2_home() -> Path:
    """Return the v2 cgroup, or its parent, that delegates the memory controller."""
    own = v2_own()
    for home in (own, own.parent):
        control = home / "cgroup.subtree_control"
        if control.exists() and "memory" in control.read_text().split():
            return home
    raise ProbeError("There is no cgroup v2 memory controller for children of ours here.")


def place_of(mountinfo: str, path: str, kind: str, controller: str | None) -> Path:
    """Return the mounted path of a cgroup. A container may see only a part of the hierarchy."""
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, mount = left.split()[3:5]
        filesystem, _, options = right.split()[:3]
        if filesystem == kind and (controller is None or controller in options.split(",")):
            inside = path == root or path.startswith(root.rstrip("/") + "/")
            relative = path[len(root.rstrip("/")) :] if inside else ""
            return Path(mount + relative.rstrip("/"))
    raise ProbeError(f"No {kind} file system is mounted here.")


def _sweep(home: Path) -> None:
    """Remove cgroups of exited owners. The kernel refuses while a process remains inside."""
    for left in home.glob(f"{_PREFIX}*-*"):
        owner = left.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            with contextlib.suppress(OSError):
                left.rmdir()
