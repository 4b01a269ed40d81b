"""What the keeper and its ranks need of Linux: who descends from whom, and dying with one's parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none can get away."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent ends, however it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def volunteer_for_the_oom_killer() -> None:
    """Out of memory ends a rank, never the keeper with its imports."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def children() -> dict[int, list[int]]:
    """Every process's children, by a snapshot of /proc."""
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 -- a hot loop
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123
                # The command name, in brackets, may hold anything: what counts stands behind the last bracket.
                parent = int(file.read().rpartition(b")")[2].split()[1])
            found.setdefault(parent, []).append(int(entry))
    return found


def descendants(root: int, spare: frozenset[int] = frozenset()) -> list[int]:
    """All processes below `root`; those in `spare` are left out, with everything below them."""
    table, found, waiting = children(), [], [root]
    while waiting:
        below = [pid for pid in table.get(waiting.pop(), []) if pid not in spare]
        found += below
        waiting += below
    return found


def end_descendants(spare: frozenset[int] = frozenset(), patience_seconds: float = 3.0) -> list[int]:
    """Kill and reap everything below this process; what is still there at the end is returned."""
    deadline = time.monotonic() + patience_seconds
    while True:
        left = descendants(os.getpid(), spare)
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(OSError):  # grandchildren become ours to reap once their parent is gone
                os.waitpid(pid, os.WNOHANG)
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)
