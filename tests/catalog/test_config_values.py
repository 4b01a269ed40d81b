"""Values of a config.json that no model has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autotune.catalog.model_lookup import find_model
from autotune.core.errors import BadInput
from tests.cli.command import TINY_CONFIG


def _write(folder: Path, **changes: object) -> str:
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **changes}))
    return str(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": 5},
        {"torch_dtype": ["bfloat16"]},
        {"text_config": {"dtype": 5}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128,128"}},
    ],
)
def test_a_dtype_or_block_that_no_model_has_is_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    with pytest.raises(BadInput, match=r"dtype|weight_block_size"):
        find_model(_write(tmp_path, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": None},
        {"dtype": "bfloat16"},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}},
    ],
)
def test_usual_ones_are_read(tmp_path: Path, changes: dict[str, object]) -> None:
    assert find_model(_write(tmp_path, **changes)).config["model_type"] == "qwen2"
