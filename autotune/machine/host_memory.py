"""Memory of this machine and of the cgroups of this process: total, available, location of the
groups, OOM kills.

The kernel's OOM killer can end a rank of a GPU probe although the device has room. OOM kills are
counted in the cgroups of this process, or else on the whole machine. Kills by a user-space daemon
are not counted; there, a SIGKILL while host memory is nearly exhausted is the evidence.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from autotune.core.errors import ProbeError

OWN_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
MOUNTS = Path("/proc/self/mountinfo")
UNLIMITED = 2**60  # cgroup v1 writes "no limit" as a number near 2^63
MIN_FREE_SHARE = 0.02  # share of free memory below which the host counts as exhausted


class HostMemory:
    def __init__(
        self, counters: tuple[Path, ...] | None = None, total_bytes: int | None = None
    ) -> None:
        if counters is None:
            counters = own_counters()
        if total_bytes is None:
            total_bytes = machine_memory_bytes()
        self._counters = counters
        self.total_bytes = total_bytes

    def kills(self) -> int:
        """Return the OOM kills in this process's cgroups, or else on the machine."""
        counts = []
        for file in self._counters:
            count = oom_kills(file)
            if count is not None:
                counts.append(count)
        if counts:
            return max(counts)
        return oom_kills(Path("/proc/vmstat")) or 0

    @property
    def is_bounded(self) -> bool:
        """True if a cgroup of this process has a limit below the machine's memory."""
        import psutil

        return self.total_bytes < int(psutil.virtual_memory().total)

    def used_bytes(self) -> int:
        """Return `total_bytes` minus the available memory; in a pod, both are the pod's."""
        return max(0, self.total_bytes - min(available_memory_bytes(), self.total_bytes))

    def was_short(self, most_used_bytes: int) -> bool:
        return most_used_bytes >= (1 - MIN_FREE_SHARE) * self.total_bytes


def own_counters() -> tuple[Path, ...]:
    """Return the OOM counters of this process's cgroups, v1 and v2."""
    files = []
    for home, name in ((v1_home, "memory.oom_control"), (v2_own, "memory.events")):
        with contextlib.suppress(OSError, ProbeError, ValueError):
            files.append(home() / name)
    return tuple(file for file in files if oom_kills(file) is not None)


def oom_kills(file: Path) -> int | None:
    """Return the number of OOM kills in memory.events, memory.oom_control or vmstat; None where
    it is not counted.
    """
    return _table(file).get("oom_kill")


def _table(file: Path) -> dict[str, int]:
    """Parse lines of a name and a number; empty for a file that cannot be read."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    numbers = {}
    for line in lines:
        columns = line.split()
        if len(columns) == 2 and columns[1].isdigit():
            numbers[columns[0]] = int(columns[1])
    return numbers


def machine_memory_bytes(cgroup: Path = OWN_CGROUP, root: Path = CGROUPS) -> int:
    """Return the memory available to all processes: the machine's, or a lower cgroup limit."""
    import psutil

    sizes = [int(psutil.virtual_memory().total)]
    sizes += [limit for _, limit in _limited_groups(cgroup, root)]
    return min(sizes)


def available_memory_bytes(cgroup: Path = OWN_CGROUP, root: Path = CGROUPS) -> int:
    """Return the memory that processes can still take: the machine's, or a lower rest of a
    cgroup such as a pod's.
    """
    import psutil

    rooms = [int(psutil.virtual_memory().available)]
    for folder, limit in _limited_groups(cgroup, root):
        usage = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if usage is not None:  # caches of files are given back on demand
            rooms.append(max(0, limit - usage + _reclaimable(folder / "memory.stat")))
    return min(rooms)


def _limited_groups(cgroup: Path, root: Path) -> list[tuple[Path, int]]:
    """Return the folders of this process's cgroup and its ancestors that have a limit."""
    try:
        lines = cgroup.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            hierarchies = [root, root / "unified"]
            file = "memory.max"
        elif "memory" in controllers.split(","):
            hierarchies = [root / "memory"]
            file = "memory.limit_in_bytes"
        else:
            continue
        for hierarchy in hierarchies:
            for group in _upwards(hierarchy / path.lstrip("/"), hierarchy):
                limit = _number(group / file)
                if limit is not None and 0 < limit < UNLIMITED:
                    groups.append((group, limit))
    return groups


def _upwards(folder: Path, top: Path) -> list[Path]:
    """Return the folder and those above it, up to the top."""
    above = [parent for parent in folder.parents if parent == top or top in parent.parents]
    return [folder, *above]


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    if not text.isdigit():
        return None
    return int(text)


def _reclaimable(stat: Path) -> int:
    """Return the bytes of inactive file caches, of the whole tree in v1."""
    figures = _table(stat)
    return figures.get("total_inactive_file") or figures.get("inactive_file") or 0


def v1_home() -> Path:
    """Return the v1 memory cgroup of this process."""
    for line in OWN_CGROUP.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return place_of(MOUNTS.read_text(), path, "cgroup", "memory")
    raise ProbeError("There is no cgroup v1 memory controller here.")


def v2_own() -> Path:
    """Return the v2 cgroup of this process."""
    for line in OWN_CGROUP.read_text().splitlines():
        number, _, path = line.split(":", 2)
        if number == "0":
            return place_of(MOUNTS.read_text(), path, "cgroup2", None)
    raise ProbeError("There is no cgroup v2 here.")


def v2_home() -> Path:
    """Return the v2 cgroup, or its parent, that delegates the memory controller."""
    cgroup = v2_own()
    for home in (cgroup, cgroup.parent):
        control = home / "cgroup.subtree_control"
        if control.exists() and "memory" in control.read_text().split():
            return home
    raise ProbeError("There is no cgroup v2 memory controller for children of ours here.")


def place_of(
    mountinfo: str,
    path: str,
    kind: str,
    controller: str | None,
) -> Path:
    """Return the mounted path of a cgroup. A container may see only a part of the hierarchy."""
    for line in mountinfo.splitlines():
        mount_fields, _, filesystem_fields = line.partition(" - ")
        root, mount = mount_fields.split()[3:5]
        filesystem, _, options = filesystem_fields.split()[:3]
        if filesystem == kind and (controller is None or controller in options.split(",")):
            above = root.rstrip("/")
            if path != root and not path.startswith(f"{above}/"):
                return Path(mount)
            return Path(mount + path.removeprefix(above).rstrip("/"))
    raise ProbeError(f"No {kind} file system is mounted here.")
