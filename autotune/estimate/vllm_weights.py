"""Weights of a vLLM engine on one rank: in its layout, and in the blocks into which they are loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from autotune.core.units import MIB
from autotune.estimate.allocator import AllocatorSettings, CachingAllocator
from autotune.estimate.model_shape import Layer, Shape, dtype_bytes

MAX_CACHED = 256  # results per function: thousands of candidates share a few shapes and settings
VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to it

FLOAT32_BYTES, WEIGHTS_PER_STATISTIC = 4, 64  # bitsandbytes, 4 bits

LOADING = AllocatorSettings(max_split_bytes=20 * MIB)
"""vLLM's allocator settings while it loads weights (`_scoped_allocator_max_split`)."""


@lru_cache(MAX_CACHED)
def weight_bytes(
    shape: Shape, *, dtype: str, tensor_parallel: int, expert_parallel: int = 1, quantised_bits: int | None = None,
    method: str | None = None,
) -> int:  # fmt: skip
    """Bytes of this rank's weights in vLLM's layout, with its rotary tables."""
    size = dtype_bytes(dtype)
    outside = (
        table_bytes(shape, 1, tensor_parallel) * (2 if shape.head else 1)
        + shape.layer_embeddings
        + shape.final_norm
        + shape.towers
        + shape.rotary_rows * shape.rotary_dim
    )
    per_weight = size if quantised_bits is None else quantised_bytes(quantised_bits, method)
    return outside * size + sum(
        _layer_bytes(layer, size, tensor_parallel, max(tensor_parallel, expert_parallel), per_weight) for layer in shape.layers
    )


def table_bytes(shape: Shape, size: int, ranks: int) -> int:
    """Bytes of this rank's part of the embedding."""
    vocabulary = -(-shape.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return vocabulary * shape.hidden // ranks * size


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # ranks of a slot: an adapter's is rounded up


@lru_cache(MAX_CACHED)
def adapter_slot_bytes(shape: Shape, size: int, ranks: int, rank: int) -> int:
    """Bytes of one slot for adapters: A and B of every product of a layer, targeted or not, without experts.

    B of products that are split by columns, and A of those split by rows, have a rank's part.
    (`lora/layers/base_linear.py`, vLLM 0.26.)
    """
    slot = next((one for one in ADAPTER_RANKS if one >= rank), rank)
    heads, cached = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    attention = 3 * shape.hidden + (heads + 2 * cached) // ranks + heads // ranks + shape.hidden
    dense = sum(3 * shape.hidden + 3 * layer.width // ranks for layer in shape.layers if layer.width)
    return slot * size * (len(shape.layers) * attention + dense)


def _layer_bytes(layer: Layer, size: int, ranks: int, expert_ranks: int, per_weight: float) -> int:
    heads = max(1, layer.cache_heads // ranks) / layer.cache_heads
    here = (layer.split - layer.experts) / ranks + layer.experts / expert_ranks + layer.key_value * heads + layer.copied
    matrices = here * layer.matrices / layer.parameters
    return round(matrices * per_weight + (here - matrices) * size)


def quantised_bytes(bits: int, method: str | None = None) -> float:
    """Bytes per weight with scales: AWQ and GPTQ: half precision and a zero point per 128 weights;
    bitsandbytes: float32 per 64 after loading; 8 bits: one per channel (not counted)."""
    if bits != 4:
        return bits / 8
    return bits / 8 + ((2 + 0.5) / 128 if method in ("awq", "gptq") else FLOAT32_BYTES / WEIGHTS_PER_STATISTIC)


def quantisation(config: Mapping[str, object]) -> str | None:
    """Return the quantisation method that the model's own config names."""
    stated = config.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    return method if isinstance(method, str) else None


@dataclass(frozen=True, kw_only=True)
class LoadedBlocks:
    """Memory that an engine's weights take beyond their size, by the blocks into which they are loaded."""

    unsplit_bytes: int = 0  # ends of blocks: larger ones are rounded up to 2 MiB and not split
    open_bytes: int = 0  # free parts of segments that hold a weight
    left_bytes: int = 0  # segments that are free


@lru_cache(MAX_CACHED)
def loaded_in_blocks(shape: Shape, size: int, ranks: int) -> LoadedBlocks:
    """Return the blocks of weights that are loaded as they are."""
    allocator = CachingAllocator(LOADING)
    for number, weight in enumerate(_matrices(shape, ranks)):
        allocator.malloc(number, weight * size)
    return LoadedBlocks(
        unsplit_bytes=allocator.allocated - allocator.requested, open_bytes=allocator.reserved - allocator.allocated
    )


def _matrices(shape: Shape, ranks: int) -> Iterator[int]:
    """Yield elements of the fused matrices, in the order in which they are made; latent attention has others."""
    yield table_bytes(shape, 1, ranks)
    for layer in shape.layers:
        if layer.cached == 2 * shape.key_value_heads * shape.head_dim:
            yield from _fused(shape, layer, ranks)[:2]
        for width in (layer.width, layer.expert_width * _experts(shape, layer)):
            if width:
                yield from (2 * width * shape.hidden // ranks, width * shape.hidden // ranks)
    if shape.head:
        yield table_bytes(shape, 1, ranks)


def _experts(shape: Shape, layer: Layer) -> int:
    return layer.experts // (3 * layer.expert_width * shape.hidden) if layer.expert_width else 0


@lru_cache(MAX_CACHED)
def quantised_in_blocks(shape: Shape, size: int, ranks: int, *, makes_head_first: bool) -> LoadedBlocks:
    """Return the blocks of dense layers once bitsandbytes has quantised them.

    Each matrix is read as it is, packed, and freed after the next one is there; its statistics are made in
    32 bits, kept in 8, and written back in 32. A free segment of 20 MiB is not split, so that nothing
    smaller finds room in it: each layer leaves some.
    """
    allocator, numbers = CachingAllocator(LOADING), itertools.count()

    def make(count: float) -> int:
        number = next(numbers)
        allocator.malloc(number, int(count))
        return number

    # 1. Parameters, packed, and the tables of rotary embeddings: angles, cosines and sines, both, in the model's dtype.
    rotary = shape.rotary_rows * shape.rotary_dim
    make(table_bytes(shape, size, ranks))
    for index, layer in enumerate(shape.layers):
        for part, elements in enumerate(_fused(shape, layer, ranks)):
            if index == 0 and part == 2:
                *parts, both = (make(rotary * 2), make(rotary * 2), make(rotary * 2), make(rotary * FLOAT32_BYTES))
                for one in parts:
                    allocator.free(one)
                make(rotary * size)
                allocator.free(both)
            make(elements / 2)
    if shape.head or makes_head_first:
        head = make(table_bytes(shape, size, ranks))
        if not shape.head:
            allocator.free(head)
    # 2. One matrix of the checkpoint after the other.
    read = packed = None
    kept: list[tuple[int, int]] = []
    for elements in (elements for layer in shape.layers for elements in _separate(shape, layer, ranks)):
        read = _replaced(allocator, read, make(elements * size))
        wide = make(elements * FLOAT32_BYTES / WEIGHTS_PER_STATISTIC)
        new = make(elements / 2)
        kept.append((make(elements / WEIGHTS_PER_STATISTIC), elements))
        allocator.free(wide)
        packed = _replaced(allocator, packed, new)
    for number in (read, packed):
        _replaced(allocator, number, None)
    # 3. Statistics of fused matrices.
    for narrow, elements in kept:
        make(elements * FLOAT32_BYTES / WEIGHTS_PER_STATISTIC)
        allocator.free(narrow)
    reserved = allocator.reserved
    allocator.empty_cache()
    return LoadedBlocks(
        unsplit_bytes=allocator.allocated - allocator.requested,
        open_bytes=allocator.reserved - allocator.allocated,
        left_bytes=reserved - allocator.reserved,
    )


@lru_cache(MAX_CACHED)
def dequantised_bytes(shape: Shape, size: int, ranks: int) -> int:
    """Segments in which bitsandbytes dequantises the matrices of a layer, one after the other: a captured graph keeps them."""
    allocator = CachingAllocator()
    kinds = dict.fromkeys(shape.layers)
    for number, elements in enumerate(elements for layer in kinds for elements in _separate(shape, layer, ranks)):
        allocator.malloc(number, elements * size)
        allocator.free(number)
    return allocator.reserved


def _replaced(allocator: CachingAllocator, old: int | None, new: int | None) -> int | None:
    if old is not None:
        allocator.free(old)
    return new


def _fused(shape: Shape, layer: Layer, ranks: int) -> tuple[int, ...]:
    """Return elements of a dense layer's four fused matrices."""
    queries, keys, values, out, gate, up, down = _separate(shape, layer, ranks)
    return queries + keys + values, out, gate + up, down


def _separate(shape: Shape, layer: Layer, ranks: int) -> tuple[int, ...]:
    """Return elements of a dense layer's seven matrices, in the order of a checkpoint."""
    queries = shape.heads * shape.head_dim // ranks * shape.hidden
    keys = max(1, shape.key_value_heads // ranks) * shape.head_dim * shape.hidden
    wide = layer.width * shape.hidden // ranks
    return queries, keys, keys, queries, wide, wide, wide
