"""The longest rows of a user's dataset with images: an image's tokens can't be cut or repeated to a length."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from typing import Any

from ..image_measurement import COLUMNS, MAX_ROWS, listed, size_of, undecoded
from . import training_data

LONGEST = 8
"""Rows that are repeated: different prompts, so that an engine's prefix cache does not shorten the rollout."""


def longest(source: Any, processor: Any, *, limit: int | None, rows: int, group: int) -> Any:
    """Return `rows` rows, the longest first; none is longer than `limit` tokens if any is within it.

    A stream can't be searched: its first rows are returned.
    """
    column = next((name for name in COLUMNS if name in (source.column_names or ())), None)
    if column is None or not hasattr(source, "select"):
        return training_data.exactly(source, rows=rows, group=group)
    training_data.refuse_few_rows(source, group)
    tokens = {index: _tokens(source[index], column, processor) for index in _shortlist(source, column)}
    within = [index for index, length in tokens.items() if limit is None or length <= limit]
    order = sorted(within or tokens, key=lambda index: tokens[index], reverse=bool(within))[:LONGEST]
    return source.select([order[row % len(order)] for row in range(rows)])


def _shortlist(source: Any, column: str) -> set[int]:
    """Return rows with the most pixels, the most images and the longest texts."""
    sample = range(0, len(source), -(-len(source) // MAX_ROWS))
    images = undecoded(source.select_columns([column]), column)
    texts = source.remove_columns([column])
    sizes = {index: [size_of(image) for image in listed(images[index][column])] for index in sample}
    ranked: tuple[Callable[[int], int], ...] = (
        lambda index: sum(width * height for width, height in sizes[index]),
        lambda index: len(sizes[index]),
        lambda index: len(str(texts[index])),
    )
    return {index for rank in ranked for index in heapq.nlargest(LONGEST, sample, key=rank)}


def _tokens(row: Mapping[str, Any], column: str, processor: Any) -> int:
    """Return the length of a row with its images, as TRL prepares it."""
    from trl import prepare_multimodal_messages

    images = listed(row[column])
    said = row.get("prompt") or row.get("messages") or row.get("text") or ""
    answer = row.get("completion") or []
    if isinstance(said, str):
        made = processor(text=[said + (answer if isinstance(answer, str) else "")], images=[images] if images else None)
    else:
        messages = [*prepare_multimodal_messages(said, images=images), *prepare_multimodal_messages(answer, images=[])]
        made = processor.apply_chat_template([messages], tokenize=True, return_dict=True, add_generation_prompt=not answer)
    return len(made["input_ids"][0])
