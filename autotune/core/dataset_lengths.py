"""Lengths of the rows and prompts of a dataset, in tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
