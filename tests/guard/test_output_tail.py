"""Output that is kept for the diagnosis: lines of two streams stay whole."""

from __future__ import annotations

from autotune.guard.attempt import ProcessEnd
from autotune.guard.ending import HostEvidence, Reason, ending_of
from autotune.guard.streams import LINE_BYTES, OutputTail
from tests.guard.child import TIMED_OUT

STDOUT, STDERR = 1, 2


def test_a_line_of_the_other_stream_does_not_begin_within_a_line() -> None:
    # Unbuffered Python writes a line and its end apart; the rank's last words come in between.
    tail = OutputTail()
    tail.add(b"step:8 - loss:1.0", STDOUT)
    tail.add(TIMED_OUT.encode() + b"\n", STDERR)
    tail.add(b"\n", STDOUT)
    assert tail.text().splitlines() == [TIMED_OUT, "step:8 - loss:1.0"]
    ending = ending_of(
        ProcessEnd(signal=6),
        tail.text(),
        HostEvidence(),
        stop_requested=False,
    )
    assert ending.reason == Reason.MACHINE


def test_bars_and_lines_without_an_end_are_kept() -> None:
    tail = OutputTail()
    tail.add(b"\r 50%|##  |", STDERR)
    tail.add(b"loss:1.0\n", STDOUT)
    tail.add(b"\r100%|####|", STDERR)
    assert "100%" in tail.fresh(), "a step is seen before its line ends"
    lines = tail.text().replace("\r", "\n").splitlines()
    assert [line for line in lines if line] == ["loss:1.0", " 50%|##  |", "100%|####|"]


def test_an_endless_line_is_kept_without_waiting_for_its_end() -> None:
    tail = OutputTail()
    tail.add(b"x" * (LINE_BYTES + 1), STDOUT)
    tail.add(b"y\n", STDERR)
    assert tail.text() == "x" * (LINE_BYTES + 1) + "y\n"
