"""Files of rows that a user names as a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autotune.core.errors import BadInput
from autotune.core.files import refuse_special_files

FILE_LOADERS: Mapping[str, str] = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
"""Suffix of a file of rows -> the name of its loader in `datasets`."""


def refuse_unreadable(named: str) -> None:
    """Refuse a file that is missing or that no framework reads. Folders and names on the hub pass."""
    path = Path(named).expanduser()
    refuse_special_files(path, way_out="Give the dataset's folder, or its name on the hub.")
    if path.suffix in FILE_LOADERS and not path.exists():
        raise BadInput(f"Dataset {named}: there is no such file.", way_out="Give the path from this folder, or the full one.")
    if path.is_file() and path.suffix not in FILE_LOADERS:
        kinds = ", ".join(FILE_LOADERS)
        raise BadInput(
            f"Dataset {named}: not a file of rows ({kinds}).", way_out="Write its rows as .jsonl, one JSON object a line."
        )
