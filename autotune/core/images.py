"""Images in the rows of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.core.candidate import KnobValue


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
