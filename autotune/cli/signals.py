"""SIGTERM ends a run as Ctrl-C does: the rigs are closed, the study stays whole, and nothing is left running."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt; while that unwinds, further ones are ignored."""
    caught = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def interrupt(number: int, frame: FrameType | None) -> None:
        # Closing the rigs takes a moment, and an impatient second Ctrl-C would leave them running.
        for each in caught:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {each: signal.getsignal(each) for each in caught}
    for each in caught:
        # nohup leaves SIGHUP ignored, and a shell's background job SIGINT: they stay so.
        if before[each] is not signal.SIG_IGN:
            signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
