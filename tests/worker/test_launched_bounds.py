"""Bounds on what a launched command prints: figures, and lines without an end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from autotune.worker.launched_output import MetricReader

RATE = {"kind": "pattern", "line": r"(?P<tokens_per_second>\S+) tok/s"}


@pytest.mark.parametrize("figure", ["inf", "nan", "-5", "0", "1e30", "1" * 400, "1e400"])
def test_a_figure_that_no_run_can_reach_is_none(figure: str) -> None:
    reader = MetricReader(RATE)
    reader.read("10 tok/s", 0.0)
    assert reader.read(f"{figure} tok/s", 1.0) is None


def test_a_count_of_400_digits_in_json_is_none() -> None:
    reader = MetricReader({"kind": "json"})
    assert reader.read('{"tokens": ' + "1" * 400 + ', "seconds": 1}', 0.0) is None


# The program prints 300 MiB without a newline; the copy must not hold them.
PROGRAM = """
import resource, subprocess, sys, tempfile
from pathlib import Path
from autotune.worker import launched_command as launched

class Recorder:
    def begin(self): pass
    def enter(self, phase): pass
    def leave(self): pass
    def emit(self, message): pass
    def report_progress(self, text): pass

sys.stdout = open("/dev/null", "w")
request = {
    "argv": [sys.executable, "-c", "for _ in range(300): print('x' * 2**20, end='')"],
    "figures": {"kind": "json"},
    "plan": {"warmup_cycles": 1, "optimizer_steps": 1, "timed_cycles": 1},
}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run = launched._LaunchedRun(request, Recorder(), Path(tempfile.mkdtemp()))
try:
    run.go()
except launched.NoFigures:
    pass
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
sys.stderr.write(f"{grown // 1024}")
"""


def test_a_line_without_an_end_does_not_fill_the_memory() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stderr) < 150, "MiB; the line itself has 300"
