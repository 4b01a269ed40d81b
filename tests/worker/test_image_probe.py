"""TRL's own trainers on rows with images, on a tiny Qwen2.5-VL."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from autotune.estimate.vision_images import images_of
from tests.counted_memory.image_cases import MODELS
from tests.worker.drive import adapter, events_stage, load_request, measure_request

pytest.importorskip("trl")
pytest.importorskip("PIL")
pytestmark = pytest.mark.slow

CONFIG = dict(MODELS["qwen2.5-vl"])


def measured(
    method: str, scratch: Path, dataset: Path | None = None, saves: bool = False, **lengths: Any
) -> dict[str, Any]:
    trl = adapter()
    request = load_request(scratch, config=CONFIG, method=method)
    trl.warm(request)
    loaded = trl.load(request, events_stage()[0])
    images = dataclasses.asdict(
        images_of(
            CONFIG,
            None,
            count=1,
            width=140,
            height=84,
        )
    )
    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    settings |= {"num_generations": 2} if method == "grpo" else {"max_length": None}
    probe_request = measure_request(settings, images=images, **lengths)
    if method == "sft":
        probe_request["settings"] = settings
    probe_request["plan"]["save_checkpoint"] = saves
    if dataset is not None:
        probe_request["dataset"] = {"dataset_name": str(dataset)}
    return trl.measure(loaded, probe_request, events_stage()[0])  # type: ignore[no-any-return]


def test_sft_trains_on_images_and_its_rows_have_their_length(tmp_path: Path) -> None:
    measurement = measured("sft", tmp_path, prompt=40, completion=8)
    assert measurement["effective"]["longest_prompt_seen"] == 48
    assert measurement["worst"]["phase_seconds"]["backward"] > 0


def test_grpo_generates_from_images_and_its_prompts_have_their_length(tmp_path: Path) -> None:
    measurement = measured(
        "grpo",
        tmp_path,
        saves=True,
        prompt=40,
        completion=6,
    )
    assert measurement["exercised"]["checkpoint_saves"] == 1
    assert measurement["effective"]["longest_prompt_seen"] == 40
    assert measurement["effective"]["longest_completion_seen"] == 6


def test_a_row_too_short_for_its_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't hold its images"):
        measured("sft", tmp_path, prompt=8, completion=2)


def drawn(folder: Path, column: str) -> Path:
    """A dataset whose first rows are short; one row has larger images, another a longer text, a
    third both.
    """
    from datasets import Dataset, Features, Image, List, Value
    from PIL import Image as Picture

    large, wordy = {7, 9}, {8, 9}
    rows = [
        {
            "prompt": [{"role": "user", "content": "a" * (20 if number in wordy else 2)}],
            "images": [Picture.new("RGB", (224, 224) if number in large else (56, 56))],
        }
        for number in range(12)
    ]
    if column == "messages":
        rows = [{"messages": row.pop("prompt"), **row} for row in rows]  # type: ignore[misc]
    kinds = Features(
        {column: [{"role": Value("string"), "content": Value("string")}], "images": List(Image())}
    )
    Dataset.from_list(rows, features=kinds).save_to_disk(str(folder))
    return folder


@pytest.mark.parametrize(
    ("method", "column"),
    [
        ("sft", "messages"),
        ("grpo", "prompt"),
    ],
)
def test_the_longest_row_of_a_dataset_is_trained_on(
    method: str,
    column: str,
    tmp_path: Path,
) -> None:
    """Both a large image and a long text count; rows longer than the limit don't, since the
    final run leaves them out.
    """
    dataset = drawn(tmp_path / "rows", column)
    spare = measured(method, tmp_path / "spare", dataset, prompt=400, completion=4)["effective"][
        "longest_prompt_seen"
    ]
    tight = measured(method, tmp_path / "tight", dataset, prompt=spare - 5, completion=4)[
        "effective"
    ]["longest_prompt_seen"]
    first = measured(method, tmp_path / "first", dataset, prompt=1, completion=4)["effective"][
        "longest_prompt_seen"
    ]
    assert first < tight < spare
    assert spare - tight == 18
