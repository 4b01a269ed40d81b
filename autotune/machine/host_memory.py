"""Host memory during a GPU probe: the kernel's OOM killer can end a rank although the device has room.

OOM kills are counted in the cgroups of this process, or else on the whole machine. Kills by a user-space daemon are not
counted; there, a SIGKILL while host memory is nearly exhausted is the evidence.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from autotune.core.errors import ProbeError
from autotune.machine import cgroups, hardware_detection

MIN_FREE_SHARE = 0.02  # share of free memory below which the host counts as exhausted


class HostMemory:
    """Used host memory and the number of OOM kills."""

    def __init__(self, counters: tuple[Path, ...] | None = None, total_bytes: int | None = None) -> None:
        self._counters = own_counters() if counters is None else counters
        self.total_bytes = hardware_detection.machine_memory_bytes() if total_bytes is None else total_bytes

    def kills(self) -> int:
        """Return the OOM kills in this process's cgroups, or else on the machine."""
        counted = [count for file in self._counters if (count := _oom_kills(file)) is not None]
        return max(counted) if counted else _oom_kills(Path("/proc/vmstat")) or 0

    @property
    def is_bounded(self) -> bool:
        """True if a cgroup of this process has a limit below the machine's memory."""
        import psutil

        return self.total_bytes < int(psutil.virtual_memory().total)

    def used_bytes(self) -> int:
        """Return `total_bytes` minus the available memory; in a pod, both are the pod's."""
        return max(0, self.total_bytes - min(hardware_detection.available_memory_bytes(), self.total_bytes))

    def was_short(self, most_used_bytes: int) -> bool:
        return most_used_bytes >= (1 - MIN_FREE_SHARE) * self.total_bytes


def own_counters() -> tuple[Path, ...]:
    """Return the OOM counters of this process's cgroups, v1 and v2."""
    found = []
    for home, file in ((cgroups.v1_home, "memory.oom_control"), (cgroups.v2_own, "memory.events")):
        with contextlib.suppress(OSError, ProbeError, ValueError):
            found.append(home() / file)
    return tuple(file for file in found if _oom_kills(file) is not None)


def _oom_kills(file: Path) -> int | None:
    """Parse the line `oom_kill N` of memory.events, memory.oom_control or vmstat."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
