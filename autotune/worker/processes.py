"""Linux process trees of the worker and its ranks, and exit together with a parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path

END_TIMEOUT_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of each descendant whose own parent exits, so that none escapes."""
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def exit_with_parent(parent: int) -> None:
    """Have this process killed when the parent exits for any reason."""
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it exited before the call above
        os._exit(1)


def prefer_for_the_oom_killer() -> None:
    """Make the kernel's OOM killer end a rank, never the worker with its imports."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def children() -> dict[int, list[int]]:
    """Return the children of each process, from a snapshot of /proc."""
    table: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123
                text = file.read()
            # The command name, in brackets, may contain anything: parse behind the last bracket.
            _, _, fields = text.rpartition(b")")
            _state, parent, *_ = fields.split()
            children = table.setdefault(int(parent), [])
            children.append(int(entry))
    return table


def descendants(root: int, spare: frozenset[int] = frozenset()) -> list[int]:
    """Return all processes below `root`, without those in `spare` and everything below them."""
    table = children()
    result = []
    pending = [root]
    while pending:
        for pid in table.get(pending.pop(), []):
            if pid not in spare:
                result.append(pid)
                pending.append(pid)
    return result


def end_descendants(spare: frozenset[int] = frozenset()) -> list[int]:
    """Kill and reap all processes below this one. Return those that remain after the timeout."""
    deadline = time.monotonic() + END_TIMEOUT_SECONDS
    while True:
        remaining = descendants(os.getpid(), spare)
        for pid in remaining:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        for pid in remaining:
            # Grandchildren become reapable once their parent is gone.
            with contextlib.suppress(OSError):
                os.waitpid(pid, os.WNOHANG)
        if not remaining or time.monotonic() > deadline:
            return remaining
        time.sleep(0.005)
