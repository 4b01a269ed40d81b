"""Figures of documents, made again by the command above them."""

from __future__ import annotations

import shlex
import subprocess
import sys
import venv
from pathlib import Path

from tests.test_documents import ROOT

PAGE = ROOT / "docs" / "predictions.md"
NOT_TRACED = "Changes of lora_r, optim were not predicted. "
"""What an environment without a training framework adds: it answers with the package alone."""


def test_the_example_of_the_page_on_predictions_is_what_its_command_prints(tmp_path: Path) -> None:
    _, _, after_prompt = PAGE.read_text().partition("```console\n$ ")
    block, _, _ = after_prompt.partition("\n```")
    command, *expected = block.splitlines()
    python = tmp_path / "environment" / "bin" / "python"
    venv.create(python.parents[1], with_pip=False)
    arguments = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "autotune", *arguments, "--python", str(python)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 3, done.stderr
    printed = done.stdout.splitlines()
    (note,) = [line for line in printed if line.startswith(NOT_TRACED)]
    assert "has no torch" in note
    printed.remove(note)
    assert printed == expected
