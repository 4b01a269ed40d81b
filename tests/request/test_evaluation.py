"""An evaluation with larger batches than the training's is no part of a prediction, and is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.request.flags import Flags
from autotune.request.request_parser import parse_request

FILE = "model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 4\n"


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        ("eval_strategy: steps\nper_device_eval_batch_size: 64\n", 64),
        ("eval_strategy: epoch\n", 8),
        ("eval_strategy: steps\nper_device_eval_batch_size: 4\n", None),
        ("eval_strategy: no\nper_device_eval_batch_size: 64\n", None),
        ("per_device_eval_batch_size: 64\n", None),
    ],
)
def test_rows_of_an_evaluation(lines: str, rows: int | None, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FILE + lines)
    flags = Flags(config=str(path), method="sft", gpus="A100-40G", mode="predict")
    sentences = [line for line in parse_request(flags).assumed if "evaluation" in line]
    if rows is None:
        assert not sentences
    else:
        (sentence,) = sentences
        assert f"batches of {rows} rows" in sentence
