"""Work in a forked process: it starts with everything loaded, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

INTERVAL_S = 0.01


def in_fork(work: Callable[[], None], limit_s: float) -> int | None:
    """Return the exit status of a process that does the work; None if it did not end in time."""
    child = os.fork()
    if child == 0:
        _do_and_exit(work)
    status = _wait(child, time.monotonic() + limit_s)
    with suppress(ProcessLookupError):  # processes that a test started and left
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def _do_and_exit(work: Callable[[], None]) -> None:
    """Do the work without output. `os._exit` skips what the parent has to do at its own exit."""
    status = 1
    try:
        os.setsid()
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.stdout.fileno())
        os.dup2(sink, sys.stderr.fileno())
        work()
        status = 0
    except BaseException:
        Path(f".failed-{os.getpid()}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


def _wait(child: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return os.waitstatus_to_exitcode(status)
        time.sleep(INTERVAL_S)
    return None
