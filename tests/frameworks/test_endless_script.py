"""A script that never builds its trainer ends with the program that looks at it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from tests.cli.command import PROGRAM, environment

pytest.importorskip("trl")

ENDLESS = """
import os
import pathlib

pathlib.Path("pid").write_text(str(os.getpid()))
while True:
    pass
"""


@pytest.mark.slow
def test_it_does_not_outlive_a_killed_program(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDLESS)
    arguments = ("predict", "--script", "train.py", "--gpus", "A100-40G")
    program = subprocess.Popen([*PROGRAM, *arguments], cwd=tmp_path, env=environment())
    file = tmp_path / "pid"
    while not file.exists() or not file.read_text():
        assert program.poll() is None
        time.sleep(0.1)
    worker = int(file.read_text())

    program.kill()
    program.wait()

    deadline = time.monotonic() + 10
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < deadline, "the script still runs"
        time.sleep(0.1)
