"""The demo's own command, read from the Makefile, so that what is tested is what is run."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cli.command import environment
from tests.light_environment import light_python_path

ROOT = Path(__file__).resolve().parents[2]


def _variable(name: str) -> str:
    match = re.search(rf"^{name} \??:?= *(.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert match is not None, name
    return match[1].strip()


def demo_flags() -> list[str]:
    """Return the flags of `make demo`, without the model and the output folder."""
    return [
        "--gpus",
        "cpu",
        "--space",
        "demo",
        "--global-batch",
        _variable("DEMO_BATCH"),
        "--memory-limit",
        _variable("DEMO_LIMIT"),
        "--budget",
        _variable("DEMO_BUDGET"),
    ]


def demo_model(folder: Path, shape: Sequence[str] = ()) -> Path:
    """The model that `make demo` makes, or one of another shape."""
    shape = shape or _variable("DEMO_SHAPE").split()
    command = [sys.executable, str(ROOT / "autotune/worker/synthetic.py"), str(folder), *shape]
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        timeout=120,
        env=environment(PYTHONPATH=light_python_path()),
    )
    return folder
