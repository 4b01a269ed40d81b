"""Loss of a cluster's head: noticed before Ray ends the driver."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from autotune.probe.executors.head_watch import LOST_SECONDS, NODE_SAMPLE_SECONDS, HeadWatch


def test_a_head_that_does_not_answer_for_a_while_is_lost() -> None:
    clock = iter(_ticks())
    with socket.create_server(("127.0.0.1", 0)) as head:
        watch = HeadWatch(f"127.0.0.1:{head.getsockname()[1]}", now=lambda: next(clock))
        assert not any(watch.is_lost() for _ in range(40))
        assert watch.wait() and watch.answers()
    assert not watch.answers()
    answers = [watch.is_lost() for _ in range(40)]
    first = answers.index(True)
    assert first >= 2 and all(answers[first:]), "it was lost at once, or found again"
    assert not watch.wait()


def _ticks() -> Iterator[float]:
    """Time that passes faster than the watch looks, and slower than it gives up."""
    assert 2 * NODE_SAMPLE_SECONDS < LOST_SECONDS
    now = 0.0
    while True:
        yield now
        now += NODE_SAMPLE_SECONDS
