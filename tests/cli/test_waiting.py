"""Waiting: what is done and how far, moving on a terminal, in lines in a pipe, gone afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from autotune.cli.waiting import Waiting
from autotune.core.progress import WorkProgress, report, watched_by
from tests.cli.pseudo_terminal import lines, watched

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import time
from autotune.cli.waiting import Waiting
from autotune.core.progress import WorkProgress, report
from autotune.report import heartbeat
heartbeat.SECONDS = 0.3
with Waiting("tracing the training step") as waiting:
    report(WorkProgress(done=2, expected=5, unit="trace"))
    time.sleep(1.4)
    waiting.stop()
    print("fits", flush=True)
"""


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100", **variables}


def test_reports_reach_those_who_watch_and_nobody_else() -> None:
    received: list[WorkProgress] = []
    done = WorkProgress(
        done=1,
        expected=3,
        unit="trace",
    )
    report(done)
    with watched_by(received.append):
        report(done)
    report(done)
    assert received == [done]
    assert str(done) == "1 of 3 traces"
    assert (
        str(
            WorkProgress(
                done=0,
                expected=1,
                unit="trace",
            )
        )
        == "0 of 1 trace"
    )


def test_the_line_says_what_and_how_far() -> None:
    with Waiting("predicting 3,024 candidates") as waiting:
        assert waiting.line() == "predicting 3,024 candidates"
        report(
            WorkProgress(
                done=2,
                expected=5,
                unit="trace",
            )
        )
        assert waiting.line() == "predicting 3,024 candidates, 2 of 5 traces"


def test_a_terminal_shows_a_moving_line_that_is_gone_afterwards() -> None:
    written, code = watched(
        [sys.executable, "-c", PROGRAM],
        ("stdout", "stderr"),
        env=environment(TERM="xterm-256color"),
        cwd=ROOT,
    )
    assert code == 0
    assert "tracing the training step, 2 of 5 traces, 1 s" in written
    assert lines(written)[-1] == "fits"


def test_a_pipe_gets_whole_lines_at_regular_times() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "fits\n" and "\x1b" not in done.stderr
    printed = done.stderr.splitlines()
    assert printed and all(
        line.startswith("tracing the training step, 2 of 5 traces") for line in printed
    )
