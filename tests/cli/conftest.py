from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import environment

MADE_UP = Path(__file__).resolve().parents[2] / "autotune" / "worker" / "synthetic.py"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, made in the training environment."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    subprocess.run(
        [sys.executable, str(MADE_UP), str(folder)],
        check=True,
        capture_output=True,
        timeout=120,
        env=environment(),
    )
    return folder
