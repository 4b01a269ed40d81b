"""Heartbeat: a line after quiet time, none while others appear, none after the end."""

from __future__ import annotations

import threading
import time

from autotune.report.heartbeat import Heartbeat

SHORT = 0.05
LONG = 60.0


def test_it_beats_again_and_again_until_it_is_stopped() -> None:
    beats = threading.Semaphore(0)
    heartbeat = Heartbeat(beats.release, seconds=SHORT)
    heartbeat.start()
    assert all(beats.acquire(timeout=30) for _ in range(3))
    heartbeat.stop()
    while beats.acquire(blocking=False):
        pass
    assert not beats.acquire(timeout=5 * SHORT), "it beats after its end"


def test_a_line_that_was_printed_meanwhile_postpones_it() -> None:
    beats: list[float] = []
    heartbeat = Heartbeat(lambda: beats.append(time.monotonic()), seconds=LONG)
    heartbeat.start()
    before = heartbeat._last
    heartbeat.postpone()
    assert heartbeat._last > before
    heartbeat.stop()
    assert not beats


def test_a_closed_stream_does_not_end_the_command() -> None:
    tried = threading.Event()

    def write() -> None:
        tried.set()
        raise BrokenPipeError

    heartbeat = Heartbeat(write, seconds=SHORT)
    heartbeat.start()
    assert tried.wait(30)
    heartbeat.stop()
