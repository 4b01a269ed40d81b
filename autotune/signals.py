"""Signals are ours, whatever a library does that is started here."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

OURS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run in good order."""


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Handlers are put back as they were: Ray, for one, puts its own on them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in OURS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
