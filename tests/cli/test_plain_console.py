"""Console of plain lines: broken on a terminal alone, and printed at once."""

from __future__ import annotations

import io
import os
import sys

import pytest

from autotune.cli.output import PlainConsole

LINE = "settings " + "num_generations=16 " * 9


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pipe_gets_whole_lines_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would keep them until the process ends: the verdict comes before the advice."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    with os.fdopen(reading, "rb") as received, os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        PlainConsole(to_stderr=False).print(LINE)
        assert received.read1() == f"{LINE}\n".encode()


def test_a_terminal_gets_lines_of_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("COLUMNS", "70")
    console = PlainConsole(to_stderr=True)
    console.print(LINE)
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 70
    assert " ".join(lines) == LINE.strip()

    console.print(LINE, soft_wrap=True)
    assert screen.getvalue().endswith(f"{LINE}\n")
