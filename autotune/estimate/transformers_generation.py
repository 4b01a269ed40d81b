"""Bytes of transformers' own `generate` beside the model, where no engine generates.

Of one row, with p prompt tokens, c completion tokens and n = p + c - 1 cached tokens in the end:

    prefill = cache(p) + one layer over p tokens + rotary tables
    layer   = cache(n) + one layer for one more token + token ids
    head    = cache(n) + logits of one token + token ids
    peak    = rows · max(prefill, layer, head)

- In the prefill, one layer at a time works on all prompts at once. Prompts differ in length:
  attention gets a mask, for which each key head is repeated for its queries.
- In a decoding step, the cache grows by `cat`: a layer's old and new keys exist together.
- Sampling keeps float32 scores and probabilities until the next token's are made.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.estimate.layer_shape import Layer
from autotune.estimate.model_shape import Shape, dtype_bytes

FLOAT32_BYTES = 4
INT64_BYTES = 8

# Bytes per logit beside the model's own logits.
SCORE_BYTES = FLOAT32_BYTES
KEPT_PER_LOGIT = SCORE_BYTES + SCORE_BYTES  # scores and probabilities, kept from token to token
MADE_PER_LOGIT = FLOAT32_BYTES  # the next token's scores, then its probabilities, beside the last's
TOKEN_BYTES = 3 * INT64_BYTES  # per token: ids, attention mask, one more copy while it grows
ROUTING_LISTS = 4  # per token and chosen expert, in int64

PeakParts = Mapping[str, int]  # kv_cache, activations, logits


def transformers_generation(
    shape: Shape,
    *,
    dtype: str,
    batch: int,
    prompt: int,
    completion: int,
) -> PeakParts:
    """Return the parts (kv_cache, activations, logits) that sum to the peak."""
    size = dtype_bytes(dtype)
    length = prompt + completion - 1
    moments = (
        _prefill(shape, size, prompt),
        _decoding_layer(shape, size, length),
        _decoding_head(shape, size, length),
    )
    highest = max(moments, key=lambda parts: sum(parts.values()))
    return {part: batch * row_bytes for part, row_bytes in highest.items()}


def cache_bytes(
    shape: Shape,
    size: int,
    batch: int,
    length: int,
) -> int:
    """Bytes of the growing cache at this length; a windowed layer caches its window, a recurrent
    one its state.
    """
    return batch * _row_cache(shape, size, length)


# One row.


def _prefill(
    shape: Shape,
    size: int,
    prompt: int,
) -> PeakParts:
    """The widest layer beside keys and values of all layers over the whole prompt."""
    cached = sum(_cached_elements(shape, layer) for layer in shape.layers)
    widest = max(_layer_prefill(shape, layer, size, prompt) for layer in set(shape.layers))
    rotary = prompt * size * 2 * shape.rotary_dim
    return {
        "kv_cache": prompt * size * cached,
        "activations": widest + rotary,
        "logits": 0,
    }


def _decoding_layer(
    shape: Shape,
    size: int,
    length: int,
) -> PeakParts:
    one_token = max(_one_more_token(shape, layer, size, length) for layer in set(shape.layers))
    return {
        "kv_cache": _row_cache(shape, size, length),
        "activations": one_token + length * TOKEN_BYTES,
        "logits": shape.vocabulary * KEPT_PER_LOGIT,
    }


def _decoding_head(
    shape: Shape,
    size: int,
    length: int,
) -> PeakParts:
    return {
        "kv_cache": _row_cache(shape, size, length),
        "activations": length * TOKEN_BYTES,
        "logits": shape.vocabulary * (size + KEPT_PER_LOGIT + MADE_PER_LOGIT),
    }


def _row_cache(
    shape: Shape,
    size: int,
    length: int,
) -> int:
    total = 0
    for layer in shape.layers:
        total += _cached_length(layer, length) * _cached_elements(shape, layer) * size
        total += layer.state * size
        total += layer.wide_state * FLOAT32_BYTES
    return total


def _layer_prefill(
    shape: Shape,
    layer: Layer,
    size: int,
    prompt: int,
) -> int:
    """max(MLP, attention) of one layer over a prompt."""
    pairs = prompt * prompt
    mlp_width = 4 * shape.hidden + _mlp_width(shape, layer)
    mlp = prompt * (size * mlp_width + _routing_bytes(layer, size)) + pairs

    # Queries while they are rotated: both products, their sum. Or rotated ones, repeated keys and
    # values, the result.
    attention_width = 3 * shape.hidden + 4 * shape.heads * shape.head_dim
    if not _repeats_keys(shape):
        attention_width += 2 * shape.key_value_heads * shape.head_dim
    attention = prompt * size * attention_width + _mask_bytes(size, pairs)
    return max(mlp, attention)


def _one_more_token(
    shape: Shape,
    layer: Layer,
    size: int,
    length: int,
) -> int:
    """Bytes of one layer for one more token of the longest completion."""
    cached = _cached_length(layer, length)
    # The old keys beside the new ones; the values grow after these are freed.
    growing = cached * _cached_elements(shape, layer) * size // 2
    reading = _mask_bytes(size, cached)
    if _repeats_keys(shape):
        reading += cached * 2 * shape.heads * shape.head_dim * size
    token = size * (4 * shape.hidden + _mlp_width(shape, layer))
    return max(growing, reading) + token


def _repeats_keys(shape: Shape) -> bool:
    """Masked attention takes as many key heads as query heads."""
    return shape.heads > shape.key_value_heads


def _mlp_width(shape: Shape, layer: Layer) -> int:
    """Elements per token: gate, up projection, product; or copies of tokens for experts."""
    copy = max(shape.hidden + 3 * layer.expert_width, 4 * shape.hidden)
    return max(3 * layer.width, layer.experts_per_token * copy)


def _routing_bytes(layer: Layer, size: int) -> int:
    """Bytes per token: router scores, also in float32, and four lists."""
    if not layer.experts:
        return 0
    experts = layer.experts * layer.experts_per_token // layer.experts_used
    scores = experts * (size + FLOAT32_BYTES)
    lists = layer.experts_per_token * ROUTING_LISTS * INT64_BYTES
    return scores + lists


def _mask_bytes(size: int, elements: int) -> int:
    """Booleans, and the same added to the scores in their dtype."""
    return elements * (1 + size)


def _cached_elements(shape: Shape, layer: Layer) -> int:
    """Elements per token and layer: transformers caches a latent unfolded into heads."""
    is_latent = layer.cached and not layer.key_value
    return shape.unfolded if is_latent else layer.cached


def _cached_length(layer: Layer, length: int) -> int:
    if layer.window is None:
        return length
    return min(length, layer.window)


# The pass over the prompts, allocation by allocation.

PrefillSizes = tuple[tuple[str, int], ...]  # name and bytes

CACHE = "cache"
WORKSPACE = "workspace"
HALF = "half of "
ADAPTED = "states of an adapter's rank"
UNPACKED = "unpacked weight of "


def prefill_sizes(
    shape: Shape,
    *,
    dtype: str,
    batch: int,
    prompt: int,
    is_padded: bool = True,
    unpacks_weights: bool = False,
    adapter_rank: int = 0,
) -> PrefillSizes:
    """Return the bytes of what the widest decoder layer allocates over the prompts; 0 for what it
    does not allocate.

    `is_padded`: prompts differ in length. Without padding transformers passes no mask, and its
    attention takes as many key heads as there are. `unpacks_weights`: of 4 bits, for each product.
    `adapter_rank`: of adapters beside such weights.
    """
    size = dtype_bytes(dtype)
    tokens = batch * prompt

    def mlp_bytes_per_token(layer: Layer) -> int:
        return size * _mlp_width(shape, layer) + _routing_bytes(layer, size)

    widest = max(dict.fromkeys(shape.layers), key=mlp_bytes_per_token)
    queries = tokens * size * shape.heads * shape.head_dim
    pairs = tokens * prompt if is_padded else 0
    return (
        ("hidden", tokens * size * shape.hidden),  # states of all tokens
        ("normed", tokens * FLOAT32_BYTES * shape.hidden),  # in which norms are computed
        ("queries", queries),
        ("keys", tokens * size * shape.key_value_heads * shape.head_dim),  # values are as large
        ("repeated", queries if pairs and _repeats_keys(shape) else 0),  # keys for each query
        ("mask", pairs),  # booleans, over all pairs of a row's tokens
        ("scores", pairs * size),  # the mask in the dtype of the scores it is added to
        ("wide", tokens * size * _mlp_width(shape, widest) // 3),  # each of the MLP's widest three
        ("routing", tokens * _routing_bytes(widest, size)),  # of experts
        ("rotary", tokens * size * shape.rotary_dim),  # cosines, or sines
        ("wide rotary", tokens * FLOAT32_BYTES * shape.rotary_dim),  # the same in 32 bits
        (ADAPTED, tokens * adapter_rank * size),
        *(_unpacked_sizes(shape, widest, size) if unpacks_weights else ()),
    )


def _unpacked_sizes(
    shape: Shape,
    layer: Layer,
    size: int,
) -> PrefillSizes:
    """Return the bytes of each matrix once unpacked. The output projection is as large as the
    queries', and the MLP's three matrices are equally large.
    """
    head_columns = shape.hidden * shape.head_dim * size
    return (
        (UNPACKED + "queries", shape.heads * head_columns),
        (UNPACKED + "keys", shape.key_value_heads * head_columns),
        (UNPACKED + "wide", layer.width * shape.hidden * size),
    )


def sizes_by_name(
    sizes: PrefillSizes,
    cache_bytes: int,
    workspace_bytes: int,
) -> dict[str, int]:
    """Return bytes by the names of `prefill_events`; without those that are zero."""
    by_name = dict(sizes)
    for name in ("queries", "keys", "hidden", "wide rotary"):
        by_name[HALF + name] = by_name.get(name, 0) // 2
    by_name[CACHE] = cache_bytes
    by_name[WORKSPACE] = workspace_bytes
    return {name: size for name, size in by_name.items() if size}
