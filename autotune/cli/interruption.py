"""Interruption of a command: a bounded time between the first stop signal and the exit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from autotune.cli.exit_codes import INTERRUPTED
from autotune.machine import signals

ABANDONED = b"Error: Interrupted. What did not close in time was abandoned; everything recorded before is kept.\n"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first stop signal into KeyboardInterrupt; end the process if it does not exit by
    itself in time. Workers exit with it."""
    with signals.interruptible(_end_at_once):
        yield


def _end_at_once() -> None:
    with contextlib.suppress(OSError):
        os.write(2, ABANDONED)  # without locks, which the main thread may hold
    os._exit(INTERRUPTED)
