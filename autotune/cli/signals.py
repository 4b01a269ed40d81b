"""SIGTERM ends a run as Ctrl-C does: the rigs are closed, the study stays whole, and nothing is left running."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

from autotune.signals import OURS, signals_kept


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt; while that unwinds, further ones are ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Closing the rigs takes a moment, and an impatient second Ctrl-C would leave them running.
        for each in OURS:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    with signals_kept():
        for each in OURS:
            # nohup leaves SIGHUP ignored, and a shell's background job SIGINT: they stay so.
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, interrupt)
        yield
