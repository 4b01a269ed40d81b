"""Heartbeat: a line at regular times for a log in which nothing else appears meanwhile."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

SECONDS = 10.0
JOIN_SECONDS = 1.0  # for a line that is being written; nobody may read it


class Heartbeat:
    """Thread that calls an action after every ten quiet seconds, between `start` and `stop`."""

    def __init__(self, action: Callable[[], None], *, seconds: float | None = None) -> None:
        self._action = action
        self._seconds = seconds or SECONDS
        self._ended = threading.Event()
        self._last = time.monotonic()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._ended.clear()
        self.postpone()
        self._thread = threading.Thread(
            target=self._run,
            name="heartbeat",
            daemon=True,
        )
        self._thread.start()

    def postpone(self) -> None:
        """Begin ten new seconds: something else was printed."""
        self._last = time.monotonic()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
            self._thread = None

    def _run(self) -> None:
        while not self._ended.wait(self._remaining()):
            if self._remaining() <= 0:
                self.postpone()
                with contextlib.suppress(OSError, ValueError):  # the stream was closed
                    self._action()

    def _remaining(self) -> float:
        due = self._last + self._seconds
        return max(0.0, due - time.monotonic())
