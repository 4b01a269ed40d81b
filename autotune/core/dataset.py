"""A dataset that a user names: its files, the lengths of its rows and prompts in tokens, and their images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.core.candidate import KnobValue
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


@dataclass(frozen=True, kw_only=True)
class PromptLengths:
    """Prompt lengths of a dataset, as the framework tokenises it."""

    rows: int
    kept: int  # rows within the requested limit; all rows without one
    percentiles: Mapping[int, int]  # percentile of the rows -> length in tokens


@dataclass(frozen=True, kw_only=True)
class LengthPercentile:
    """Loss of data when the row length is limited to a percentile."""

    share: int  # per cent of the rows within `length`
    length: int
    longer: int  # rows above `length`
    cut: int  # tokens lost by truncating longer rows
    left_out: int  # tokens lost by dropping longer rows


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    """Lengths of a dataset's whole rows, as they are trained on."""

    rows: int
    looked_at: int  # sample size for large datasets; the figures below refer to the sample
    tokens: int
    percentiles: tuple[LengthPercentile, ...]  # from the shortest to the longest row


@dataclass(frozen=True, kw_only=True)
class Images:
    """Images of each row, all of one size."""

    count: int
    width: int  # pixels, before the processor resizes
    height: int
    tokens: int  # of one image in the language model
    processor: Mapping[str, KnobValue | Mapping[str, int]]  # options of the model's image processor

    @property
    def row_tokens(self) -> int:
        """Tokens of one row's images."""
        return self.count * self.tokens

    def __str__(self) -> str:
        return (
            f"{self.count} image{'' if self.count == 1 else 's'} of {self.width}x{self.height} a row, {self.tokens:,} tokens each"
        )


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """Sizes of the images in a dataset's rows."""

    rows: int | None  # None: a dataset of the hub, whose first rows were read
    looked_at: int
    sizes: tuple[tuple[tuple[int, int], ...], ...]  # width and height of each image of each row in the sample
