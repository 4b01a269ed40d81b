"""Stop signals: conversion to KeyboardInterrupt, a deadline for the exit, and protection from
libraries that replace handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

END_SECONDS = 9.0  # time between the first stop signal and the forced end
REPEAT_SECONDS = 0.1  # interval at which a signal is repeated until its handler has run


@dataclass
class _Stop:
    """Interruption of this process, which only the main thread receives."""

    requested: bool = False
    raised: bool = False
    postponed: int = 0  # depth of `uninterrupted` blocks of the main thread


_stop = _Stop()


def stop_requested() -> bool:
    """Return True once a stop signal was received inside `interruptible`."""
    return _stop.requested


@contextlib.contextmanager
def restored_signals() -> Iterator[None]:
    """Restore the handlers on exit: Ray, for example, replaces them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_stop_signals() -> None:
    """Ignore further stop signals: an exit takes a moment, and a second Ctrl-C would leave
    workers running.
    """

    def ignore(number: int, frame: FrameType | None) -> None:
        """Do nothing. SIG_IGN would make the interpreter complain about a signal that has
        already arrived.
        """

    for number in STOP_SIGNALS:
        signal.signal(number, ignore)


@contextlib.contextmanager
def interruptible(force_end: Callable[[], None]) -> Iterator[None]:
    """Turn the first stop signal into KeyboardInterrupt; ignore further ones while it unwinds.

    SIGTERM thereby ends a run like Ctrl-C: workers are closed and the study stays consistent. If
    the process still exists END_SECONDS later, another thread calls `force_end`: a call into a
    database or a driver may not return, and an exception in a callback is lost.
    """
    _stop.requested = _stop.raised = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if _stop.requested:
            return
        _stop.requested = True
        if not _stop.postponed:
            _raise()

    with restored_signals(), _deadline(force_end):
        for number in STOP_SIGNALS:
            # Ignored signals stay ignored: SIGHUP under nohup, SIGINT in a shell's background job.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, interrupt)
        yield


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Postpone an interruption to the end of the block, so that a transaction is complete or was
    never begun. In other threads, which are never interrupted, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _stop.postponed += 1
    try:
        yield
    finally:
        _stop.postponed -= 1
    if _stop.requested and not _stop.raised and not _stop.postponed:
        _raise()


def _raise() -> None:
    _stop.raised = True
    raise KeyboardInterrupt


@contextlib.contextmanager
def _deadline(force_end: Callable[[], None]) -> Iterator[None]:
    """Watch for stop signals from another thread.

    The interpreter writes a signal's number into a pipe at once; its handler runs only when the
    main thread is back from native code. A signal that arrives just before a blocking call, or in
    another thread, does not end that call: it is repeated until the handler has run.
    """
    repeater = _Repeater(main_thread=threading.get_ident())
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while received := os.read(read_end, 64):
                numbers = set(received) & set(STOP_SIGNALS)
                if numbers:
                    deadline = time.monotonic() + END_SECONDS
                    repeater.repeat(min(numbers), deadline)
                    # Also after the context: what closes at the end of the process may not return
                    # either.
                    time.sleep(max(0.0, deadline - time.monotonic()))
                    force_end()
                    return
        os.close(read_end)

    threading.Thread(
        target=watch,
        name="stop-signals",
        daemon=True,
    ).start()
    try:
        yield
    finally:
        repeater.end()
        signal.set_wakeup_fd(before)
        os.close(write_end)


class _Repeater:
    """Repeats a stop signal to the main thread until its handler has run."""

    def __init__(self, main_thread: int) -> None:
        self._main_thread = main_thread
        self._lock = threading.Lock()
        self._ended = False

    def repeat(self, number: int, deadline: float) -> None:
        while time.monotonic() < deadline:
            time.sleep(REPEAT_SECONDS)
            with self._lock:
                if self._ended or _stop.requested:
                    return
                signal.pthread_kill(self._main_thread, number)

    def end(self) -> None:
        """Send no further signal: from here on, the handlers are those of before."""
        with self._lock:
            self._ended = True


_at_once = False


def skip_exit_handlers() -> None:
    """Let the command end without them: Ray's end in a segmentation fault without the head of
    their cluster.
    """
    global _at_once
    _at_once = True


def exit_handlers_are_skipped() -> bool:
    """Return True if the process must end at once."""
    return _at_once
