"""A forked call of the program does what one in an interpreter of its own does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.command import PROGRAM, autotune, environment

CALLS = (
    ("--version",),
    ("show", "gpus", "--json"),
    ("predict", "--model", "Qwen2.5-7B", "--gpus", "2xA100-40G", "--json"),
    ("run", "--model", "Qwen2.5-7X", "--gpus", "cpu"),
    ("no-such-command",),
)


@pytest.mark.parametrize("arguments", CALLS, ids=" ".join)
def test_code_and_streams_are_equal(arguments: tuple[str, ...], tmp_path: Path) -> None:
    spawned = subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
        check=False,
    )
    forked = autotune(*arguments, cwd=tmp_path)
    assert (forked.code, forked.out, forked.err) == (
        spawned.returncode,
        spawned.stdout,
        spawned.stderr,
    )
