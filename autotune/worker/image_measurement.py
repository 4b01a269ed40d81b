"""Reads the sizes of a dataset's images: of each row, width and height of every image.

The training interpreter runs it (`python .../autotune/worker images`), with one JSON object on stdin and one on stdout:

    {"dataset": {"dataset_name": ..., "datasets": [...], ...}, ...}
    {"rows": n | null, "looked_at": n, "sizes": [[[width, height], ...], ...]}

A large dataset is sampled at a regular stride; of a dataset of the hub, the first rows are read and
nothing else is fetched. Images are opened for their header alone.
"""

from __future__ import annotations

import itertools
import os
from io import BytesIO
from pathlib import Path
from typing import Any

from .prompt_measurement import load_splits, print_answer
from .row_measurement import load_rows

COLUMNS = ("images", "image")  # columns that TRL's trainers read
MAX_ROWS = 2_000
MAX_FETCHED_ROWS = 200
MAX_IMAGES = 256  # of one row


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from datasets import load_dataset

    # 1. The training split, and its length; None for one that is read from the hub row by row.
    named, number = request["dataset"], None
    place, split = str(named.get("dataset_name") or ""), named.get("dataset_train_split") or "train"
    if place and not Path(place).exists() and os.environ.get("HF_HUB_OFFLINE") != "1":
        rows = load_dataset(place, name=named.get("dataset_config"), split=split, streaming=True)
    else:
        rows = load_rows(named) if Path(place).is_file() else load_splits(named)[split]
        number = len(rows)
    # 2. The sizes of a sample
    column = next((name for name in COLUMNS if name in (rows.column_names or ())), None)
    if column is None or number == 0:
        return {"rows": number, "looked_at": 0, "sizes": []}
    sample = undecoded(rows.select_columns([column]), column)
    sample = sample.take(MAX_FETCHED_ROWS) if number is None else sample.select(range(0, number, -(-number // MAX_ROWS)))
    sizes = [[size_of(image) for image in itertools.islice(listed(row[column]), MAX_IMAGES)] for row in sample]
    return {"rows": number, "looked_at": len(sizes), "sizes": sizes}


def undecoded(rows: Any, column: str) -> Any:
    """Return the rows with images as bytes or paths: decoding would read every pixel."""
    from datasets import Image

    feature, plain = rows.features[column], Image(decode=False)
    if isinstance(feature, Image):
        return rows.cast_column(column, plain)
    if isinstance(feature, list) and isinstance(feature[0], Image):
        return rows.cast_column(column, [plain])
    if isinstance(getattr(feature, "feature", None), Image):
        return rows.cast_column(column, type(feature)(plain))
    return rows


def listed(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def size_of(image: Any) -> list[int]:
    """Return width and height of an image given as bytes, as a path, or decoded."""
    from PIL import Image

    if isinstance(image, dict):
        image = BytesIO(image["bytes"]) if image.get("bytes") is not None else image["path"]
    if isinstance(image, str | BytesIO):
        with Image.open(image) as opened:
            return list(opened.size)
    return list(image.size)


def main() -> None:
    print_answer(answer)
