"""A dataset that a user names: its files, the lengths of its rows, prompts and completions in
tokens, and their images.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist, fmean

from autotune.core.errors import BadInput
from autotune.core.files import refuse_special_files
from autotune.core.space import KnobValue
from autotune.core.units import counted

MEDIAN = 50  # per cent of the rows
FILE_LOADERS: Mapping[str, str] = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""Suffix of a file of rows -> the name of its loader in `datasets`."""


def refuse_unreadable(dataset: str) -> None:
    """Refuse a file that is missing or that no framework reads. Folders and names on the hub
    pass.
    """
    path = Path(dataset).expanduser()
    refuse_special_files(path, way_out="Give the dataset's folder, or its name on the hub.")
    is_rows = path.suffix in FILE_LOADERS
    if is_rows and not path.exists():
        raise BadInput(
            f"Dataset {dataset}: there is no such file.",
            way_out="Give the path from this folder, or the full one.",
        )
    if path.is_file() and not is_rows:
        raise BadInput(
            f"Dataset {dataset}: not a file of rows ({', '.join(FILE_LOADERS)}).",
            way_out="Write its rows as .jsonl, one JSON object a line.",
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

    @property
    def median(self) -> int | None:
        """Tokens of the middle row; None: not measured."""
        for percentile in self.percentiles:
            if percentile.share == MEDIAN:
                return percentile.length
        return None


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
        images = counted(self.count, "image")
        return f"{images} of {self.width}x{self.height} a row, {self.tokens:,} tokens each"


@dataclass(frozen=True, kw_only=True)
class ImageRows:
    """Sizes of the images in a dataset's rows."""

    rows: int | None  # None: a dataset of the hub, whose first rows were read
    looked_at: int
    # Width and height of each image of each row in the sample
    sizes: tuple[tuple[tuple[int, int], ...], ...]


MAX_SAMPLE = 512  # quantiles that are kept of a longer list
P95 = 0.95


@dataclass(frozen=True)
class TokenLengths:
    """Sample of lengths, sorted."""

    source: str  # as the user named it
    sample: tuple[int, ...]
    # Equal parts of training, where lengths change; empty: they do not
    stages: tuple[TokenLengths, ...] = ()

    @classmethod
    def of(cls, source: str, lengths: Iterable[float]) -> TokenLengths:
        """Return the lengths; of a long list, its quantiles."""
        ordered = sorted(max(1, round(length)) for length in lengths)
        if not ordered:
            raise ValueError("no lengths")
        if len(ordered) <= MAX_SAMPLE:
            return cls(source, tuple(ordered))
        quantiles = [ordered[int(share * len(ordered))] for share in _even_shares()]
        return cls(source, tuple(quantiles))

    @classmethod
    def lognormal(
        cls,
        source: str,
        mean: float,
        p95: float,
    ) -> TokenLengths:
        """Return quantiles of a lognormal distribution.

        mean = exp(m + s²/2); p95 = exp(m + z·s), z: 95 % quantile of the normal distribution; so
        ln(p95 / mean) = z·s - s²/2, whose smaller root is s.
        """
        z = NormalDist().inv_cdf(P95)
        ratio = math.log(p95 / mean)
        if ratio < 0 or z * z < 2 * ratio:
            raise ValueError(
                f"a lognormal distribution has its 95 % quantile at 1 to {math.exp(z * z / 2):.1f}"
                " times its mean"
            )
        s = z - math.sqrt(z * z - 2 * ratio)
        m = math.log(mean) - s * s / 2
        normal_quantiles = map(NormalDist().inv_cdf, _even_shares())
        return cls.of(source, (math.exp(m + s * quantile) for quantile in normal_quantiles))

    @classmethod
    def changing(cls, source: str, stages: Iterable[TokenLengths]) -> TokenLengths:
        """Return the lengths of a whole training, whose parts have these."""
        parts = tuple(stages)
        lengths: list[int] = []
        for part in parts:
            lengths += part.sample
        return replace(cls.of(source, lengths), stages=parts)

    @property
    def parts(self) -> tuple[TokenLengths, ...]:
        return self.stages or (self,)

    @property
    def mean(self) -> float:
        return fmean(self.sample)

    def quantile(self, share: float) -> int:
        size = len(self.sample)
        return self.sample[min(size - 1, int(share * size))]

    def up_to(self, longest: int) -> TokenLengths:
        """Return the lengths, cut at the longest that is generated."""
        sample = tuple(min(length, longest) for length in self.sample)
        return TokenLengths(self.source, sample, tuple(part.up_to(longest) for part in self.stages))

    def draw(self, count: int, seed: int = 0) -> list[int]:
        """Return lengths of a batch: evenly spaced quantiles in random order."""
        generator = random.Random(seed)
        lengths = []
        for place in range(count):
            share = (place + generator.random()) / count
            lengths.append(self.quantile(share))
        generator.shuffle(lengths)
        return lengths

    def expected_longest(self, count: int) -> float:
        """Return the expected maximum of `count` independent lengths.

        E[max] = sum over the sorted sample of length · ((i/n)^count - ((i-1)/n)^count)
        """
        n = len(self.sample)
        terms = []
        for i, length in enumerate(self.sample, 1):
            probability = (i / n) ** count - ((i - 1) / n) ** count
            terms.append(length * probability)
        return sum(terms)


def _even_shares() -> list[float]:
    """Return the shares of MAX_SAMPLE evenly spaced quantiles."""
    return [(place + 0.5) / MAX_SAMPLE for place in range(MAX_SAMPLE)]
