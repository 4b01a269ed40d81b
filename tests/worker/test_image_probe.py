"""TRL's own trainers on rows with images, on a tiny Qwen2.5-VL."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from autotune.estimate.image_tokens import images_of
from tests.counted_memory.image_cases import MODELS
from tests.worker.drive import adapter, events_stage, load_request, measure_request

pytest.importorskip("trl")
pytest.importorskip("PIL")
pytestmark = pytest.mark.slow

CONFIG = dict(MODELS["qwen2.5-vl"])


def measured(method: str, scratch: Path, **lengths: Any) -> dict[str, Any]:
    trl, request = adapter(), load_request(scratch, config=CONFIG, method=method)
    trl.warm(request)
    loaded = trl.load(request, events_stage()[0])
    images = dataclasses.asdict(images_of(CONFIG, None, count=1, width=140, height=84))
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    settings |= {"num_generations": 2} if method == "grpo" else {"max_length": None}
    asked = measure_request(settings, images=images, **lengths)
    if method == "sft":
        asked["settings"] = settings
    return trl.measure(loaded, asked, events_stage()[0])  # type: ignore[no-any-return]


def test_sft_trains_on_images_and_its_rows_have_their_length(tmp_path: Path) -> None:
    found = measured("sft", tmp_path, prompt=40, completion=8)
    assert found["effective"]["longest_prompt_seen"] == 48
    assert found["worst"]["phase_seconds"]["backward"] > 0


def test_grpo_generates_from_images_and_its_prompts_have_their_length(tmp_path: Path) -> None:
    found = measured("grpo", tmp_path, prompt=40, completion=6)
    assert found["effective"]["longest_prompt_seen"] == 40
    assert found["effective"]["longest_completion_seen"] == 6


def test_a_row_too_short_for_its_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't hold its images"):
        measured("sft", tmp_path, prompt=8, completion=2)
