"""Allocations of transformers' `generate` over the prompts: one pass of all layers, which fills the cache.

The order is that of transformers' decoder layers (Llama and its many copies): norm, projections, rotary
embeddings, cache, attention, MLP. Each layer finds the blocks that the one before left, and the keys and
values stay in some of them: this is what decides which of them a step can use afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache

from autotune.core.trace import Part
from autotune.estimate.model_shape import Shape, dtype_bytes
from autotune.estimate.transformers_generation import repeats_keys, widest_mlp

FLOAT32_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class PrefillSizes:
    """Bytes of what the widest decoder layer allocates over the prompts."""

    hidden: int  # hidden states of all tokens
    normed: int  # the same in float32, in which norms are computed
    queries: int
    keys: int  # values are as large
    repeated: int  # keys repeated for each query; 0: attention reads them as they are
    mask: int  # booleans, over all pairs of a row's tokens
    scores: int  # the mask in the dtype of the scores it is added to
    wide: int  # one of the MLP's three widest tensors
    routing: int  # of experts
    rotary: int  # cosines, or sines


def prefill_sizes(shape: Shape, *, dtype: str, batch: int, prompt: int) -> PrefillSizes:
    size, tokens = dtype_bytes(dtype), batch * prompt
    wide, routing = widest_mlp(shape, size)
    queries = tokens * size * shape.heads * shape.head_dim
    return PrefillSizes(
        hidden=tokens * size * shape.hidden,
        normed=tokens * FLOAT32_BYTES * shape.hidden,
        queries=queries,
        keys=tokens * size * shape.key_value_heads * shape.head_dim,
        repeated=queries if repeats_keys(shape) else 0,
        mask=tokens * prompt,
        scores=tokens * prompt * size,
        wide=tokens * size * wide // 3,
        routing=tokens * routing,
        rotary=tokens * size * shape.rotary_dim,
    )


CACHE, WORKSPACE, HALF = "cache", "workspace", "half of "


@dataclass(frozen=True, kw_only=True)
class PrefillEvents:
    """Events as in a trace: n+1 makes allocation n, -(n+1) frees it."""

    names: tuple[str, ...]  # of each allocation's size
    parts: tuple[Part, ...]
    order: tuple[int, ...]
    cache: tuple[int, ...]  # n+1 of the allocations that hold keys and values in the end


@cache
def prefill_events(layers: int, present: frozenset[str]) -> PrefillEvents:
    """Return the events of all layers; `present`: names of the sizes above zero."""
    book = _Book(present)
    kept = [book.make("hidden"), book.make("rotary"), book.make("rotary"), book.make("mask")]
    hidden, held = kept[0], []
    for layer in range(layers):
        before = hidden
        normed = _norm(book)
        query = book.make("queries")
        if layer == 0:
            book.make(WORKSPACE, "workspaces")
        key, value = book.make("keys"), book.make("keys")
        turned, turned_key = _rotated(book, "queries"), _rotated(book, "keys")
        book.drop(query, key)
        held += [book.make(CACHE, "kv_cache"), book.make(CACHE, "kv_cache")]
        book.drop(turned_key, value)
        repeated = [book.make("repeated"), book.make("repeated"), book.make("scores")]
        read = book.make("queries")
        book.drop(*repeated)
        out = book.make("hidden")
        book.drop(read, turned, normed)
        residual = book.make("hidden")
        book.drop(out)
        normed = _norm(book)
        hidden = _mlp(book, normed, residual)
        book.drop(before if layer else None)
    book.drop(_norm(book), hidden, *kept)
    cache_blocks = tuple(one for one in held if one is not None)
    return PrefillEvents(names=tuple(book.names), parts=tuple(book.parts), order=tuple(book.order), cache=cache_blocks)


class _Book:
    """The allocations and events under construction."""

    def __init__(self, present: frozenset[str]) -> None:
        self.names: list[str] = []
        self.parts: list[Part] = []
        self.order: list[int] = []
        self._present = present

    def make(self, name: str, part: Part = "activations") -> int | None:
        if name not in self._present:
            return None
        self.names.append(name)
        self.parts.append(part)
        self.order.append(len(self.names))
        return len(self.names)

    def drop(self, *made: int | None) -> None:
        self.order.extend(-one for one in made if one is not None)


def _norm(book: _Book) -> int | None:
    wide = book.make("normed")
    squares = book.make("normed")
    book.drop(squares)
    scaled = book.make("normed")
    book.drop(wide)
    narrow = book.make("hidden")
    normed = book.make("hidden")
    book.drop(narrow, scaled)
    return normed


def _rotated(book: _Book, name: str) -> int | None:
    cosine = book.make(name)
    half = book.make(HALF + name)
    turned = book.make(name)
    book.drop(half)
    sine = book.make(name)
    book.drop(turned)
    both = book.make(name)
    book.drop(cosine, sine)
    return both


def _mlp(book: _Book, normed: int | None, residual: int | None) -> int | None:
    routing = book.make("routing")
    gate = book.make("wide")
    active = book.make("wide")
    book.drop(gate)
    up = book.make("wide")
    product = book.make("wide")
    book.drop(active, up)
    down = book.make("hidden")
    book.drop(product, normed, routing)
    hidden = book.make("hidden")
    book.drop(down, residual)
    return hidden


def sizes_of(sizes: PrefillSizes, cache_bytes: int, workspace_bytes: int) -> dict[str, int]:
    """Return bytes by the names of `prefill_events`; without those that are zero."""
    found = {field.name: getattr(sizes, field.name) for field in fields(sizes)}
    found |= {HALF + name: found[name] // 2 for name in ("queries", "keys")}
    found |= {CACHE: cache_bytes, WORKSPACE: workspace_bytes}
    return {name: size for name, size in found.items() if size}
