"""Sizes and numbers of images, read from datasets as TRL's trainers take them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request

datasets: Any = pytest.importorskip("datasets")
Image: Any = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow

QWEN, GEMMA = "Qwen/Qwen2.5-VL-3B-Instruct", "google/gemma-4-E2B"


def written(folder: Path, *rows: list[tuple[int, int]], column: str = "images") -> str:
    """Write rows with images of these sizes as parquet, as the hub has them."""
    values: list[Any] = []
    for row in rows:
        pictures = [Image.new("RGB", size) for size in row]
        values.append(pictures if column == "images" else pictures[0])
    feature = datasets.Image()
    if column == "images":
        feature = datasets.Sequence(feature)
    features = datasets.Features({"prompt": datasets.Value("string"), column: feature})
    columns = {"prompt": ["What is it?"] * len(rows), column: values}
    rows_dataset = datasets.Dataset.from_dict(columns, features=features)
    file = folder / "rows.parquet"
    rows_dataset.to_parquet(str(file))
    return str(file)


def parsed(dataset: str, model: str = QWEN, **flags: Any) -> ParsedRequest:
    return parse_request(
        Flags(
            model=model,
            gpus="A100-80G",
            dataset=dataset,
            mode="predict",
            **flags,
        )
    )


def images_of(request: ParsedRequest) -> tuple[int, int, int]:
    """Return number, width and height of the images of a row."""
    images = request.job.task.workload.images
    assert images is not None
    return images.count, images.width, images.height


def test_the_row_with_the_most_image_tokens_counts(tmp_path: Path) -> None:
    dataset = written(tmp_path, [(56, 56)], [(112, 56), (560, 280)], [(448, 448)])
    request = parsed(dataset)
    assert images_of(request) == (2, 560, 280)
    assert "the largest among 3 of 3 rows" in "\n".join(request.notes)


def test_a_single_image_has_a_column_of_its_own(tmp_path: Path) -> None:
    dataset = written(tmp_path, [(640, 480)], [(32, 32)], column="image")
    assert images_of(parsed(dataset, model=GEMMA)) == (1, 640, 480)


def test_a_flag_outweighs_the_dataset(tmp_path: Path) -> None:
    dataset = written(tmp_path, [(640, 480)])
    _, width, _ = images_of(parsed(dataset, image_size="56x56"))
    assert width == 56


def test_rows_without_images_have_none(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n')
    assert parsed(str(file)).job.task.workload.images is None


def test_an_unreadable_dataset_is_noted_with_what_to_state_instead(tmp_path: Path) -> None:
    request = parsed(str(tmp_path / "absent"))
    assert request.job.task.workload.images is None
    assert any(
        "images of the dataset are not counted" in note and "--image-size" in note
        for note in request.notes
    )
