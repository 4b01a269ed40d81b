"""Memory of transformers' own `generate` beside the model, if no engine generates.

The peak is the largest of three:
- prefill: one layer over all prompts at once;
- last decoding steps, one layer at work: the cache at its longest, and it grows by `cat`, so a
  layer's old and new keys exist together;
- last decoding steps, logits of one token: sampling keeps float32 scores and probabilities until
  the next token's are made.

Events of the prefill have the order of transformers' decoder layers (Llama and its many copies):
norm, projections, rotary embeddings, cache, attention, MLP. Each layer finds the blocks that the
one before left, and the keys and values stay in some of them: this is what decides which of them a
step can use afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from autotune.core.trace import Part
from autotune.estimate.layer_shape import Layer
from autotune.estimate.model_shape import Shape, dtype_bytes

FLOAT32_BYTES = 4

# Bytes per logit beside the model's own logits.
SCORE_BYTES = FLOAT32_BYTES
KEPT_PER_LOGIT = SCORE_BYTES + SCORE_BYTES  # scores and probabilities, kept from token to token
MADE_PER_LOGIT = 4  # the next token's scores, then its probabilities, while the last one's are held
TOKEN_BYTES = (
    3 * 8
)  # per token of the sequence: ids, attention mask, one more copy while it grows (int64)


def transformers_generation(
    shape: Shape, *, dtype: str, batch: int, prompt: int, completion: int
) -> Mapping[str, int]:
    """Return the parts (kv_cache, activations, logits) that sum to the peak.

    Prompts differ in length: attention gets a mask, for which each key head is repeated for its
    queries.
    """
    layers, size = set(shape.layers), dtype_bytes(dtype)
    # 1. Prefill: widest layer + keys and values of all layers over the whole prompt.
    prompts = batch * prompt * size
    widest = max(_layer_prefill(shape, layer, size, batch, prompt) for layer in layers)
    prefill = {
        "kv_cache": prompts * sum(_cached_elements(shape, layer) for layer in shape.layers),
        "activations": widest + prompts * 2 * shape.rotary_dim,
        "logits": 0,
    }
    # 2. Decoding at the longest cache.
    length = prompt + completion - 1
    cache, tokens = cache_bytes(shape, size, batch, length), batch * length * TOKEN_BYTES
    one_token = max(_one_more_token(shape, layer, size, batch, length) for layer in layers)
    logits = batch * shape.vocabulary
    layer = {
        "kv_cache": cache,
        "activations": one_token + tokens,
        "logits": logits * KEPT_PER_LOGIT,
    }
    head = {
        "kv_cache": cache,
        "activations": tokens,
        "logits": logits * (size + KEPT_PER_LOGIT + MADE_PER_LOGIT),
    }
    return max(prefill, layer, head, key=lambda parts: sum(parts.values()))


def cache_bytes(shape: Shape, size: int, batch: int, length: int) -> int:
    """Bytes of the growing cache at this length; a windowed layer caches its window, a recurrent
    one its state.
    """
    growing = sum(
        _cached_length(layer, length) * _cached_elements(shape, layer) for layer in shape.layers
    )
    states = sum(layer.state * size + layer.wide_state * FLOAT32_BYTES for layer in shape.layers)
    return batch * (growing * size + states)


def _layer_prefill(shape: Shape, layer: Layer, size: int, batch: int, prompt: int) -> int:
    """max(MLP, attention) of one layer over the prompts."""
    tokens, mask = batch * prompt, batch * prompt * prompt
    mlp = (
        tokens
        * (size * (4 * shape.hidden + _mlp_width(shape, layer)) + _routing_bytes(layer, size))
        + mask
    )
    # Queries while they are rotated: both products, their sum. Or rotated ones, repeated keys and
    # values, the result.
    queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    width = 3 * shape.hidden + 4 * queries + (0 if _repeats_keys(shape) else 2 * keys)
    return max(mlp, tokens * size * width + _mask_bytes(size, mask))


def _one_more_token(shape: Shape, layer: Layer, size: int, batch: int, length: int) -> int:
    """Bytes of one layer for one more token of the longest completions."""
    cached = batch * _cached_length(layer, length)
    growing = (
        cached * _cached_elements(shape, layer) * size // 2
    )  # the old keys; the values grow after these are freed
    repeated = cached * 2 * shape.heads * shape.head_dim * size if _repeats_keys(shape) else 0
    reading = repeated + _mask_bytes(size, cached)
    return max(growing, reading) + batch * size * (4 * shape.hidden + _mlp_width(shape, layer))


def _repeats_keys(shape: Shape) -> bool:
    """Masked attention takes as many key heads as query heads."""
    return shape.heads > shape.key_value_heads


def _mlp_width(shape: Shape, layer: Layer) -> int:
    """Elements per token: gate, up projection, product; or copies of tokens for experts."""
    copies = layer.experts_per_token * max(shape.hidden + 3 * layer.expert_width, 4 * shape.hidden)
    return max(3 * layer.width, copies)


def _routing_bytes(layer: Layer, size: int) -> int:
    """Bytes per token: router scores, also in float32, and four 64-bit lists."""
    if not layer.experts:
        return 0
    count = layer.experts * layer.experts_per_token // layer.experts_used
    return count * (size + FLOAT32_BYTES) + layer.experts_per_token * 4 * 8


def _mask_bytes(size: int, elements: int) -> int:
    """Booleans, and the same added to the scores in their dtype."""
    return elements * (1 + size)


def _cached_elements(shape: Shape, layer: Layer) -> int:
    """Elements per token and layer: transformers caches a latent unfolded into heads."""
    return layer.cached if layer.key_value or not layer.cached else shape.unfolded


def _cached_length(layer: Layer, length: int) -> int:
    return length if layer.window is None else min(length, layer.window)


# Events of the prefill: one pass of all layers, which fills the cache.


PrefillSizes = tuple[tuple[str, int], ...]  # name and bytes


def prefill_sizes(shape: Shape, *, dtype: str, batch: int, prompt: int) -> PrefillSizes:
    """Return the bytes of what the widest decoder layer allocates over the prompts."""
    size, tokens = dtype_bytes(dtype), batch * prompt
    widest = max(
        set(shape.layers),
        key=lambda layer: size * _mlp_width(shape, layer) + _routing_bytes(layer, size),
    )
    queries = tokens * size * shape.heads * shape.head_dim
    return (
        ("hidden", tokens * size * shape.hidden),  # states of all tokens
        (
            "normed",
            tokens * FLOAT32_BYTES * shape.hidden,
        ),  # the same in float32, in which norms are computed
        ("queries", queries),
        ("keys", tokens * size * shape.key_value_heads * shape.head_dim),  # values are as large
        (
            "repeated",
            queries if _repeats_keys(shape) else 0,
        ),  # keys for each query; 0: attention reads them as they are
        ("mask", tokens * prompt),  # booleans, over all pairs of a row's tokens
        ("scores", tokens * prompt * size),  # the mask in the dtype of the scores it is added to
        (
            "wide",
            tokens * size * _mlp_width(shape, widest) // 3,
        ),  # one of the MLP's three widest tensors
        ("routing", tokens * _routing_bytes(widest, size)),  # of experts
        ("rotary", tokens * size * shape.rotary_dim),  # cosines, or sines
    )


CACHE, WORKSPACE, HALF = "cache", "workspace", "half of "


def sizes_of(sizes: PrefillSizes, cache_bytes: int, workspace_bytes: int) -> dict[str, int]:
    """Return bytes by the names of `prefill_events`; without those that are zero."""
    found = dict(sizes)
    found |= {HALF + name: found[name] // 2 for name in ("queries", "keys")}
    found |= {CACHE: cache_bytes, WORKSPACE: workspace_bytes}
    return {name: size for name, size in found.items() if size}


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
    names: list[str] = []
    parts: list[Part] = []
    order: list[int] = []

    def make(name: str, part: Part = "activations") -> int | None:
        if name not in present:
            return None
        names.append(name)
        parts.append(part)
        order.append(len(names))
        return len(names)

    def drop(*made: int | None) -> None:
        order.extend(-one for one in made if one is not None)

    def norm() -> int | None:
        wide = make("normed")
        drop(make("normed"))
        scaled = make("normed")
        drop(wide)
        narrow = make("hidden")
        normed = make("hidden")
        drop(narrow, scaled)
        return normed

    def rotated(name: str) -> int | None:
        cosine = make(name)
        half = make(HALF + name)
        turned = make(name)
        drop(half)
        sine = make(name)
        drop(turned)
        both = make(name)
        drop(cosine, sine)
        return both

    def mlp(normed: int | None, residual: int | None) -> int | None:
        routing, gate, active = make("routing"), make("wide"), make("wide")
        drop(gate)
        up, product = make("wide"), make("wide")
        drop(active, up)
        down = make("hidden")
        drop(product, normed, routing)
        hidden = make("hidden")
        drop(down, residual)
        return hidden

    kept = [make("hidden"), make("rotary"), make("rotary"), make("mask")]
    hidden, held = kept[0], []
    for layer in range(layers):
        before = hidden
        normed = norm()
        query = make("queries")
        if layer == 0:
            make(WORKSPACE, "workspaces")
        key, value = make("keys"), make("keys")
        turned, turned_key = rotated("queries"), rotated("keys")
        drop(query, key)
        held += [make(CACHE, "kv_cache"), make(CACHE, "kv_cache")]
        drop(turned_key, value)
        repeated = [make("repeated"), make("repeated"), make("scores")]
        read = make("queries")
        drop(*repeated)
        out = make("hidden")
        drop(read, turned, normed)
        residual = make("hidden")
        drop(out)
        hidden = mlp(norm(), residual)
        drop(before if layer else None)
    drop(norm(), hidden, *kept)
    in_cache = tuple(one for one in held if one is not None)
    return PrefillEvents(names=tuple(names), parts=tuple(parts), order=tuple(order), cache=in_cache)
