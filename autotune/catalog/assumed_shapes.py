"""Nearest catalogued shape of a model that is not here, by the words of its name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from autotune import catalog
from autotune.catalog import KnownModel
from autotune.core.job import Model

# Words of a name for weights that are stored otherwise than the original's: memory differs.
_QUANTISED = re.compile(
    r"gptq|awq|bnb|gguf|ggml|exl2|marlin|fp8|fp4|nf4|mxfp4|nvfp4|int[48]|[48]bit|w[48]a\d+",
    re.IGNORECASE,
)


def assumed_model(full_name: str, parts: Sequence[str]) -> Model | None:
    """Return the shape of the catalogued model whose name these parts contain, the longest first:
    `someone/Qwen2.5-7B-mine` has that of Qwen2.5-7B, and so has a folder that is not here.
    """
    name = _words("-".join(parts))
    if any(_QUANTISED.fullmatch(word) for word in name):
        return None
    closest: KnownModel | None = None
    best_rank = (1, 0, 0)
    for model in catalog.models():
        known_words = _words(model.ids[0].split("/", 1)[1])
        kernel = _kernel(known_words)
        if not _contains(name, kernel):
            continue
        shared_words = len(set(known_words) & set(name))
        rank = (len(kernel), shared_words - len(known_words), shared_words)
        if rank > best_rank:
            best_rank, closest = rank, model
    if closest is None:
        return None
    return Model(
        name=full_name,
        config=closest.config,
        folder=None,
        origin=f"shape of {closest.ids[0]} assumed by the name; --model names another",
        is_assumed=True,
    )


def _words(name: str) -> list[str]:
    """Return the words of a short name: `qwen2.5-7b-it` has three."""
    return [word for word in re.split(r"[-_]+", name.lower()) if word]


_DECORATIONS = frozenset({"meta", "instruct", "it", "chat", "hf", "base"})
"""Words of a catalogued name that say nothing about the shape."""


def _kernel(name_parts: list[str]) -> list[str]:
    """Return the words of a name that define its shape: `llama-3-8b`."""
    return [word for word in name_parts if word not in _DECORATIONS]


_OTHER_SHAPES = frozenset({"vl", "omni", "audio", "vision", "moe", "mini", "next", "distill"})
"""Words of a name that mean another shape than the same name without them."""


def _contains(name_parts: list[str], part: list[str]) -> bool:
    """Return True if the words contain the part, in its order. Words in between may name what a
    model was trained for, such as `coder`, but not that its shape is another.
    """
    position = 0
    between: set[str] = set()
    for word in name_parts:
        if position < len(part) and word == part[position]:
            position += 1
        elif 0 < position < len(part):
            between.add(word)
    return position == len(part) and not between & _OTHER_SHAPES
