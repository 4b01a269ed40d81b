"""The machine's own memory beside a GPU rig: the limit is on the device, and the host can end a rank all the same.

The kernel counts whom it ends: for the control groups that we are in, which tells ours from everybody's, and for the whole
machine. What a daemon ends on its own account it does not count; there a SIGKILL while next to nothing was left must do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from autotune import detect
from autotune.errors import RigError
from autotune.rig import cgroups

SHORT_SHARE = 0.02
"""Less than this of the memory left is next to none."""

_V1, _V2 = "memory.oom_control", "memory.events"


class HostMemory:
    """What is used of the memory that our processes can have, and how many of them the kernel has ended."""

    def __init__(self, counters: tuple[Path, ...] | None = None, total_bytes: int | None = None) -> None:
        self._counters = own_counters() if counters is None else counters
        self.total_bytes = detect.machine_memory_bytes() if total_bytes is None else total_bytes

    def kills(self) -> int:
        """How many processes of our own control groups the kernel has ended; of the machine, where no group tells."""
        counted = [count for file in self._counters if (count := _oom_kills(file)) is not None]
        return max(counted) if counted else _oom_kills(Path("/proc/vmstat")) or 0

    def used_bytes(self) -> int:
        """Of `total_bytes`, what cannot be given to whoever asks next."""
        import psutil

        return max(0, self.total_bytes - min(int(psutil.virtual_memory().available), self.total_bytes))

    def was_short(self, most_used_bytes: int) -> bool:
        return most_used_bytes >= (1 - SHORT_SHARE) * self.total_bytes


def own_counters() -> tuple[Path, ...]:
    """The files that count the kills among the processes of our control group and those below it, of v1 and v2."""
    homes: tuple[tuple[Callable[[], Path], str], ...] = ((cgroups.v1_home, _V1), (cgroups.v2_own, _V2))
    found = []
    for home, file in homes:
        with contextlib.suppress(OSError, RigError, ValueError):
            found.append(home() / file)
    return tuple(file for file in found if _oom_kills(file) is not None)


def _oom_kills(file: Path) -> int | None:
    """The line `oom_kill N`, which memory.events, memory.oom_control and vmstat have in common."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None
