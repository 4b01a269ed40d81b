"""Rollout: what transformers' own `generate` holds beside the model, where no engine generates.

Three moments compete. The prefill runs a layer over all prompts at once. The last steps of decoding hold the cache at its longest
and, on top, either one layer at work (the cache grows by `cat`: a layer's old keys and its new ones live together) or the
logits of one token, of which sampling keeps float32 scores and probabilities until those of the next token are made.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.predict import shapes
from autotune.predict.shapes import Layer, Shape, dtype_bytes

KEPT_PER_LOGIT = 4 + 4
"""Bytes beside the model's own logits that live on from token to token: scores and their probabilities."""

MADE_PER_LOGIT = 4
"""The next token's scores, and then its probabilities, are made while the last one's are held."""

TEMPERATURE_COPY = 4
"""Each processor writes new scores while the ones that it was given are still held."""

TOP_K_COPY = 4 + 1
"""New scores, and which are left out."""

SORTED = 4 + 8
"""Top-p sorts: scores in order, and where they stood as 64-bit integers."""

AFTER_SORTING = 4 + 1 + 1 + 4
"""Then running sums, which are left out in order and in place, and new scores."""

SORTING_ON_CUDA = 20
"""What torch's segmented sort takes inside, of which nothing is left after it."""

TOKEN_BYTES = 3 * 8
"""Bytes per token of the sequence: ids, attention mask and one more copy of it while it grows, as 64-bit integers."""


def transformers_generation(
    config: Mapping[str, object],
    *,
    dtype: str,
    batch: int,
    prompt: int,
    completion: int,
    padded: bool = True,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    on_cpu: bool = False,
) -> Mapping[str, int]:
    """What is held at the peak, by part (kv_cache, activations, logits): sums to the peak.

    `padded` says whether prompts differ in length: then attention gets a mask, as it does where a window is shorter than the
    prompt, and with a mask each key head is repeated for its queries.
    """
    shape, size = shapes.shape(config), dtype_bytes(dtype)
    length, processed = prompt + completion - 1, _processed(temperature, top_k, top_p, on_cpu=on_cpu)
    moments = [
        _prefill(shape, size, batch, prompt, padded=padded),
        _layer_at_work(shape, size, batch, length, padded=padded),
        _sampling(shape, size, batch, length, processed=processed),
    ]
    return max(moments, key=lambda parts: sum(parts.values()))


def cache_bytes(shape: Shape, size: int, batch: int, length: int) -> int:
    """The cache while it grows, at this length; of a window's layer, what it looks back."""
    return sum(batch * _kept(layer, length) * _cached_elements(shape, layer) * size for layer in shape.layers)


def _prefill(shape: Shape, size: int, batch: int, prompt: int, *, padded: bool) -> dict[str, int]:
    """The widest layer's moment, with every layer's keys and values made: of all of the prompt, windows or not."""
    tokens = batch * prompt
    widest = max(_passed_through(shape, layer, size, batch, prompt, padded=padded) for layer in set(shape.layers))
    return {
        "kv_cache": sum(tokens * size * _cached_elements(shape, layer) for layer in shape.layers),
        "activations": widest + tokens * size * 2 * shape.rotary_dim,
        "logits": 0,
    }


def _passed_through(shape: Shape, layer: Layer, size: int, batch: int, prompt: int, *, padded: bool) -> int:
    """What one layer holds while the prompts go through it: in its MLP, or in its attention."""
    tokens, masked = batch * prompt, padded or _is_windowed(layer, prompt)
    mask = batch * prompt * prompt if masked else 0
    mlp = tokens * (size * (4 * shape.hidden + _mlp_width(shape, layer)) + _routing_bytes(layer, size)) + mask
    attention = tokens * size * (3 * shape.hidden + _attention_width(shape, masked=masked)) + _mask_bytes(size, mask)
    return max(mlp, attention)


def _layer_at_work(shape: Shape, size: int, batch: int, length: int, *, padded: bool) -> dict[str, int]:
    """The layer that takes most for one more token, at the end of the longest completions."""
    widest = max(_one_more_token(shape, layer, size, batch, length, padded=padded) for layer in set(shape.layers))
    return {
        "kv_cache": cache_bytes(shape, size, batch, length),
        "activations": widest + batch * length * TOKEN_BYTES,
        "logits": batch * shape.vocabulary * KEPT_PER_LOGIT,
    }


def _one_more_token(shape: Shape, layer: Layer, size: int, batch: int, length: int, *, padded: bool) -> int:
    kept, masked = batch * _kept(layer, length), padded or _is_windowed(layer, length)
    growing = kept * _cached_elements(shape, layer) * size // 2  # the old keys; values follow when these are gone
    repeated = kept * 2 * shape.heads * shape.head_dim * size if _repeats(shape, masked=masked) else 0
    reading = repeated + (_mask_bytes(size, kept) if masked else 0)
    return max(growing, reading) + batch * size * (4 * shape.hidden + _mlp_width(shape, layer))


def _sampling(shape: Shape, size: int, batch: int, length: int, *, processed: int) -> dict[str, int]:
    per_logit = size + KEPT_PER_LOGIT + MADE_PER_LOGIT + processed
    return {
        "kv_cache": cache_bytes(shape, size, batch, length),
        "activations": batch * length * TOKEN_BYTES,
        "logits": batch * shape.vocabulary * per_logit,
    }


def _processed(temperature: float, top_k: int, top_p: float, *, on_cpu: bool) -> int:
    """Bytes per logit of what stands between the model's scores and their probabilities."""
    sorting = SORTED + max(AFTER_SORTING, 0 if on_cpu else SORTING_ON_CUDA)
    return (temperature != 1.0) * TEMPERATURE_COPY + (top_k > 0) * TOP_K_COPY + (top_p < 1.0) * sorting


def _is_windowed(layer: Layer, length: int) -> bool:
    return layer.window is not None and layer.window < length


def _mlp_width(shape: Shape, layer: Layer) -> int:
    """Elements per token of the MLP's gate, other half and product; experts work on copies of their tokens, and return copies."""
    copies = layer.experts_per_token * max(shape.hidden + 3 * layer.expert_width, 4 * shape.hidden)
    return max(3 * layer.width, copies)


def _routing_bytes(layer: Layer, size: int) -> int:
    """Bytes per token of the router's scores, as they come and as float32, and of who goes where in four 64-bit lists."""
    if not layer.experts:
        return 0
    count = layer.experts * layer.experts_per_token // layer.experts_used
    return count * (size + 4) + layer.experts_per_token * 4 * 8


def _attention_width(shape: Shape, *, masked: bool) -> int:
    """Elements per token: rotated queries and the result, and what is repeated for them."""
    heads = shape.heads * shape.head_dim
    return 2 * heads + (2 * heads if _repeats(shape, masked=masked) else 0)


def _repeats(shape: Shape, *, masked: bool) -> bool:
    """With a mask, attention takes as many key heads as query heads."""
    return masked and shape.heads > shape.key_value_heads


def _mask_bytes(size: int, elements: int) -> int:
    """As booleans, and added to the scores in their own precision."""
    return elements * (1 + size)


def _cached_elements(shape: Shape, layer: Layer) -> int:
    """Elements per token and layer: transformers caches what attention reads, a latent unfolded into heads."""
    return layer.cached if layer.key_value else shape.unfolded


def _kept(layer: Layer, length: int) -> int:
    return length if layer.window is None else min(length, layer.window)
