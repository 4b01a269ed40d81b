"""Standard streams that the caller closed: the exit code is the command's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = f"{sys.executable} -m autotune"


@pytest.mark.parametrize(
    ("command", "code"),
    [("--help >&-", 0), ("--help >&- 2>&- <&-", 0), ("predict --gpus nonsense 2>&-", 2)],
)
def test_the_exit_code_stays(command: str, code: int) -> None:
    """An interpreter that cannot flush a closed stream at its end exits with 120."""
    process = subprocess.run(["bash", "-c", f"{PROGRAM} {command}"], check=False)
    assert process.returncode == code


def test_a_file_never_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """Otherwise what is printed would be written into it: the first file opened gets number 1."""
    log = tmp_path / "train.log"
    log.write_text("torch.OutOfMemoryError: CUDA out of memory.")
    report = tmp_path / "report"
    program = f"{PROGRAM} diagnose {log} >&- 2>{report}"
    process = subprocess.run(["bash", "-c", program], check=False)
    assert process.returncode == 0, report.read_text()
    assert log.read_text() == "torch.OutOfMemoryError: CUDA out of memory."
