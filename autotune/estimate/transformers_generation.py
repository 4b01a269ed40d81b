"""Memory of transformers' own `generate` beside the model, if no engine generates.

The peak is the largest of three:
- prefill: one layer over all prompts at once;
- last decoding steps, one layer at work: the cache at its longest, and it grows by `cat`, so a
  layer's old and new keys exist together;
- last decoding steps, logits of one token: sampling keeps float32 scores and probabilities until
  the next token's are made.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.estimate import model_shape
from autotune.estimate.model_shape import Layer, Shape, dtype_bytes

# Bytes per logit beside the model's own logits.
SCORE_BYTES = 4
KEPT_PER_LOGIT = SCORE_BYTES + SCORE_BYTES  # scores and probabilities, kept from token to token
MADE_PER_LOGIT = 4  # the next token's scores, then its probabilities, while the last one's are held
TOKEN_BYTES = 3 * 8  # per token of the sequence: ids, attention mask, one more copy while it grows (int64)


def transformers_generation(
    config: Mapping[str, object], *, dtype: str, batch: int, prompt: int, completion: int
) -> Mapping[str, int]:
    """Return the parts (kv_cache, activations, logits) that sum to the peak.

    Prompts differ in length: attention gets a mask, for which each key head is repeated for its queries.
    """
    shape, size = model_shape.shape(config), dtype_bytes(dtype)
    length = prompt + completion - 1
    cache, tokens = cache_bytes(shape, size, batch, length), batch * length * TOKEN_BYTES
    one_token = max(_one_more_token(shape, layer, size, batch, length) for layer in set(shape.layers))
    logits = batch * shape.vocabulary
    candidates = [
        _prefill(shape, size, batch, prompt),
        {"kv_cache": cache, "activations": one_token + tokens, "logits": logits * KEPT_PER_LOGIT},
        {"kv_cache": cache, "activations": tokens, "logits": logits * (size + KEPT_PER_LOGIT + MADE_PER_LOGIT)},
    ]
    return max(candidates, key=lambda parts: sum(parts.values()))


def cache_bytes(shape: Shape, size: int, batch: int, length: int) -> int:
    """Bytes of the growing cache at this length; a windowed layer caches its window, a recurrent one its state."""
    growing = sum(_cached_length(layer, length) * _cached_elements(shape, layer) for layer in shape.layers)
    states = sum(layer.state * size + layer.wide_state * 4 for layer in shape.layers)
    return batch * (growing * size + states)


def _prefill(shape: Shape, size: int, batch: int, prompt: int) -> dict[str, int]:
    """Widest layer + keys and values of all layers over the whole prompt."""
    tokens = batch * prompt
    widest = max(_layer_prefill(shape, layer, size, batch, prompt) for layer in set(shape.layers))
    return {
        "kv_cache": sum(tokens * size * _cached_elements(shape, layer) for layer in shape.layers),
        "activations": widest + tokens * size * 2 * shape.rotary_dim,
        "logits": 0,
    }


def widest_mlp(shape: Shape, size: int) -> tuple[int, int]:
    """Return elements and bytes of routing per token, of the layer with the widest MLP."""
    widest = max(set(shape.layers), key=lambda layer: size * _mlp_width(shape, layer) + _routing_bytes(layer, size))
    return _mlp_width(shape, widest), _routing_bytes(widest, size)


def repeats_keys(shape: Shape) -> bool:
    """Masked attention takes as many key heads as query heads."""
    return shape.heads > shape.key_value_heads


def _layer_prefill(shape: Shape, layer: Layer, size: int, batch: int, prompt: int) -> int:
    """max(MLP, attention) of one layer over the prompts."""
    tokens, mask = batch * prompt, batch * prompt * prompt
    mlp = tokens * (size * (4 * shape.hidden + _mlp_width(shape, layer)) + _routing_bytes(layer, size)) + mask
    # Queries while they are rotated: both products, their sum. Or rotated ones, repeated keys and values, the result.
    queries, keys = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    width = 3 * shape.hidden + 4 * queries + (0 if repeats_keys(shape) else 2 * keys)
    return max(mlp, tokens * size * width + _mask_bytes(size, mask))


def _one_more_token(shape: Shape, layer: Layer, size: int, batch: int, length: int) -> int:
    """Bytes of one layer for one more token of the longest completions."""
    cached = batch * _cached_length(layer, length)
    growing = cached * _cached_elements(shape, layer) * size // 2  # the old keys; the values grow after these are freed
    repeated = cached * 2 * shape.heads * shape.head_dim * size if repeats_keys(shape) else 0
    reading = repeated + _mask_bytes(size, cached)
    return max(growing, reading) + batch * size * (4 * shape.hidden + _mlp_width(shape, layer))


def _mlp_width(shape: Shape, layer: Layer) -> int:
    """Elements per token: gate, up projection, product; or copies of tokens for experts."""
    copies = layer.experts_per_token * max(shape.hidden + 3 * layer.expert_width, 4 * shape.hidden)
    return max(3 * layer.width, copies)


def _routing_bytes(layer: Layer, size: int) -> int:
    """Bytes per token: router scores, also in float32, and four 64-bit lists."""
    if not layer.experts:
        return 0
    count = layer.experts * layer.experts_per_token // layer.experts_used
    return count * (size + 4) + layer.experts_per_token * 4 * 8


def _mask_bytes(size: int, elements: int) -> int:
    """Booleans, and the same added to the scores in their dtype."""
    return elements * (1 + size)


def _cached_elements(shape: Shape, layer: Layer) -> int:
    """Elements per token and layer: transformers caches a latent unfolded into heads."""
    return layer.cached if layer.key_value or not layer.cached else shape.unfolded


def _cached_length(layer: Layer, length: int) -> int:
    return length if layer.window is None else min(length, layer.window)
