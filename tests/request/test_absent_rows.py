"""Rows that a recipe names and this machine lacks: no obstacle for a prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.errors import BadInput
from autotune.request.flags import Flags
from autotune.request.request_parser import parse_request

RECIPE = "model_name_or_path: Qwen/Qwen2.5-7B\ndataset_name: /mnt/not/here/rows.json\n"


def test_a_recipes_rows_may_be_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    flags = Flags(
        config=str(tmp_path / "recipe.yaml"),
        gpus="H100",
        mode="predict",
    )
    request = parse_request(flags, limit_prompts=True)
    assert request.job.task.workload.model.name == "Qwen/Qwen2.5-7B"
    (note,) = [note for note in request.notes if "Prompts are limited" in note]
    assert "--max-prompt-length N" in note


def test_rows_that_are_typed_have_to_be_here() -> None:
    flags = Flags(
        model="Qwen2.5-7B",
        dataset="/mnt/not/here/rows.json",
        gpus="H100",
        mode="predict",
    )
    with pytest.raises(BadInput, match="there is no such file"):
        parse_request(flags)
