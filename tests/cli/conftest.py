from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pipeline import made_up_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, made in the training environment."""
    return shutil.copytree(made_up_model(), tmp_path_factory.mktemp("tiny") / "model")
