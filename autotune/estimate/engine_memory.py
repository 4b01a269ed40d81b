"""Weights and cache of a vLLM engine on one rank.

Weights: in vLLM's layout, and in the blocks into which they are loaded. Cache: paged into blocks,
in vLLM's own integer arithmetic. Layers with equal caches form a group. All groups take blocks from
one pool; a block holds one page of each layer of a group. Pages are equally large: a layer with
less per token has more tokens in one. A recurrent layer stores its state in a page, and attention's
pages grow until one is as large. A test compares this with the installed vLLM's own functions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from autotune.core.units import GIB, MIB
from autotune.estimate.allocator import AllocatorSettings, CachingAllocator
from autotune.estimate.layer_shape import Layer
from autotune.estimate.model_shape import Shape, dtype_bytes

MAX_CACHED = 256  # results per function: thousands of candidates share a few shapes and settings
VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to it

FLOAT32_BYTES, WEIGHTS_PER_STATISTIC = 4, 64  # bitsandbytes, 4 bits

LOADING = AllocatorSettings(max_split_bytes=20 * MIB)
"""vLLM's allocator settings while it loads weights (`_scoped_allocator_max_split`)."""


@lru_cache(MAX_CACHED)
def weight_bytes(
    shape: Shape,
    *,
    dtype: str,
    tensor_parallel: int,
    expert_parallel: int = 1,
    quantised_bits: int | None = None,
    method: str | None = None,
) -> int:
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
        _layer_bytes(
            layer, size, tensor_parallel, max(tensor_parallel, expert_parallel), per_weight
        )
        for layer in shape.layers
    )


def table_bytes(shape: Shape, size: int, ranks: int) -> int:
    """Bytes of this rank's part of the embedding."""
    vocabulary = -(-shape.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return vocabulary * shape.hidden // ranks * size


ADAPTER_RANKS = (
    1,
    8,
    16,
    32,
    64,
    128,
    256,
    320,
    512,
)  # ranks of a slot: an adapter's is rounded up


@lru_cache(MAX_CACHED)
def adapter_slot_bytes(shape: Shape, size: int, ranks: int, rank: int) -> int:
    """Bytes of one slot for adapters: A and B of every product of a layer, targeted or not, without
    experts.

    B of products that are split by columns, and A of those split by rows, have a rank's part.
    (`lora/layers/base_linear.py`, vLLM 0.26.)
    """
    slot = next((one for one in ADAPTER_RANKS if one >= rank), rank)
    heads, cached = shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    attention = 3 * shape.hidden + (heads + 2 * cached) // ranks + heads // ranks + shape.hidden
    dense = sum(
        3 * shape.hidden + 3 * layer.width // ranks for layer in shape.layers if layer.width
    )
    return slot * size * (len(shape.layers) * attention + dense)


def _layer_bytes(layer: Layer, size: int, ranks: int, expert_ranks: int, per_weight: float) -> int:
    heads = max(1, layer.cache_heads // ranks) / layer.cache_heads
    here = (
        (layer.split - layer.experts) / ranks
        + layer.experts / expert_ranks
        + layer.key_value * heads
        + layer.copied
    )
    matrices = here * layer.matrices / layer.parameters
    return round(matrices * per_weight + (here - matrices) * size)


def quantised_bytes(bits: int, method: str | None = None) -> float:
    """Bytes per weight with scales: AWQ and GPTQ: half precision and a zero point per 128 weights;
    bitsandbytes: float32 per 64 after loading; 8 bits: one per channel (not counted)."""
    if bits != 4:
        return bits / 8
    return bits / 8 + (
        (2 + 0.5) / 128 if method in ("awq", "gptq") else FLOAT32_BYTES / WEIGHTS_PER_STATISTIC
    )


def quantisation(config: Mapping[str, object]) -> str | None:
    """Return the quantisation method that the model's own config names."""
    stated = config.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    return method if isinstance(method, str) else None


@dataclass(frozen=True, kw_only=True)
class LoadedBlocks:
    """Memory that an engine's weights take beyond their size, by the blocks into which they are
    loaded.
    """

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
        unsplit_bytes=allocator.allocated - allocator.requested,
        open_bytes=allocator.reserved - allocator.allocated,
    )


def _matrices(shape: Shape, ranks: int) -> Iterator[int]:
    """Yield elements of the fused matrices, in the order in which they are made; latent
    attention has others.
    """
    yield table_bytes(shape, 1, ranks)
    for layer in shape.layers:
        if layer.cached == 2 * shape.key_value_heads * shape.head_dim:
            yield from _fused(shape, layer, ranks)[:2]
        experts = (
            layer.experts // (3 * layer.expert_width * shape.hidden) if layer.expert_width else 0
        )
        for width in (layer.width, layer.expert_width * experts):
            if width:
                yield from (2 * width * shape.hidden // ranks, width * shape.hidden // ranks)
    if shape.head:
        yield table_bytes(shape, 1, ranks)


@lru_cache(MAX_CACHED)
def quantised_in_blocks(
    shape: Shape, size: int, ranks: int, *, makes_head_first: bool
) -> LoadedBlocks:
    """Return the blocks of dense layers once bitsandbytes has quantised them.

    Each matrix is read as it is, packed, and freed after the next one is there; its statistics are
    made in 32 bits, kept in 8, and written back in 32. A free segment of 20 MiB is not split, so
    that nothing smaller finds room in it: each layer leaves some.
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
                *parts, both = (
                    make(rotary * 2),
                    make(rotary * 2),
                    make(rotary * 2),
                    make(rotary * FLOAT32_BYTES),
                )
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
    for elements in (
        elements for layer in shape.layers for elements in _separate(shape, layer, ranks)
    ):
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
    """Segments in which bitsandbytes dequantises the matrices of a layer, one after the other: a
    captured graph keeps them.
    """
    allocator = CachingAllocator()
    kinds = dict.fromkeys(shape.layers)
    for number, elements in enumerate(
        elements for layer in kinds for elements in _separate(shape, layer, ranks)
    ):
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


# The cache.

BLOCK_TOKENS = 16  # vLLM's default
LATENT_BLOCK_TOKENS = 64  # of latent attention's kernels
# per sequence and group of recurrent layers: running, and at the last whole block (prefix caching)
STATE_BLOCKS = 2
WIDE_STATE_BYTES = 4  # per element of a state in float32
MANUAL = "https://docs.vllm.ai/en/latest/configuration/conserving_memory/"


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Cache of one engine on one rank."""

    windows: tuple[int | None, ...]  # attention window of each group; None: unlimited
    block_bytes: int  # bytes of one block in the pool
    block_tokens: int  # of the layers with the most per token
    group_tokens: tuple[int, ...]  # tokens per block of each group; 0: recurrent layers
    in_flight_tokens: (
        int  # tokens scheduled but not finished: a window's blocks are freed only afterwards
    )

    def blocks(self, available: int) -> int:
        return max(available, 0) // self.block_bytes

    def blocks_per_sequence(self, length: int) -> int:
        """Blocks that a sequence of this length can hold at a time."""
        found = 0
        for window, tokens in zip(self.windows, self.group_tokens, strict=True):
            if not tokens:
                found += STATE_BLOCKS
            elif window is None:
                found += -(-length // tokens)
            else:  # a window can begin in the middle of a block
                found += -(-min(window - 1 + self.in_flight_tokens, length) // tokens) + 1
        return found

    def needed(self, length: int) -> int:
        """Bytes for one sequence of this length."""
        return self.block_bytes * self.blocks_per_sequence(length)

    def longest(self, available: int, at_most: int) -> int:
        """Return the longest sequence, up to `at_most`, that fits; 0: none."""
        usable = available - self.block_bytes  # one block is reserved as the null block
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.needed(middle) <= usable else (low, middle - 1)
        return low

    def concurrency(self, available: int, length: int) -> float:
        """Sequences of this length that fit at a time."""
        return self.blocks(available) / self.blocks_per_sequence(length)

    def tokens(self, available: int, length: int) -> int:
        """Cache size in tokens, as vLLM logs it."""
        return int(self.concurrency(available, length) * length)

    def refusal(self, available: int, length: int) -> str | None:
        """Return vLLM's error message if the cache is too small for one sequence of this length."""
        usable = available - self.block_bytes
        if usable <= 0:
            return (
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
                " when initializing the engine (this flag also controls CPU memory reservation on"
                f" the CPU backend, despite its name). See {MANUAL} for more details."
            )
        if self.needed(length) <= usable:
            return None
        needed, longest = self.needed(length), self.longest(available, length)
        estimated = (
            f"Based on the available memory, the estimated maximum model length is {longest}. "
            if longest
            else ""
        )
        return (
            f"To serve at least one request with the model's max seq len ({length}), ({gib(needed)}"
            " GiB KV cache is needed, which is larger than the available KV cache memory"
            f" ({gib(usable)} GiB). {estimated}Try increasing `gpu_memory_utilization` (which also"
            " controls CPU memory on the CPU backend) or decreasing `max_model_len` when"
            f" initializing the engine. See {MANUAL} for more details."
        )


@lru_cache(256)
def pages(
    shape: Shape,
    *,
    element_bytes: int,
    tensor_parallel: int,
    max_num_batched_tokens: int,
    concurrent_batches: int = 2,
) -> Pages:
    """Return the paging on one rank. One batch runs while the next is scheduled."""
    latent = all(layer.cache_heads == 1 and layer.key_value == 0 for layer in shape.layers)
    smallest = LATENT_BLOCK_TOKENS if latent else BLOCK_TOKENS
    layers = [layer for layer in shape.layers if layer.cached or layer.state or layer.wide_state]
    page = max(bytes_per_token(layer, element_bytes, tensor_parallel) for layer in layers)
    state = max(
        (layer.state * element_bytes + layer.wide_state * WIDE_STATE_BYTES) // tensor_parallel
        for layer in layers
    )
    block_tokens = smallest * max(1, -(-state // (smallest * page)))

    def tokens(layer: Layer) -> int:
        return (
            block_tokens * (page // bytes_per_token(layer, element_bytes, tensor_parallel))
            if layer.cached
            else 0
        )

    # Layers per group: the rarest kind's count, or a close commonest.
    kinds = Counter((layer.window, tokens(layer)) for layer in layers)
    fewest, most = min(kinds.values()), max(kinds.values())
    layers_per_group = most if most < fewest * 1.5 else fewest
    groups = [kind for kind, count in kinds.items() for _ in range(-(-count // layers_per_group))]
    return Pages(
        windows=tuple(window for window, _ in groups),
        block_bytes=page * block_tokens * layers_per_group,
        block_tokens=block_tokens,
        group_tokens=tuple(count for _, count in groups),
        in_flight_tokens=concurrent_batches * max_num_batched_tokens,
    )


def bytes_per_token(layer: Layer, element_bytes: int, ranks: int) -> int:
    """Bytes per token of one layer on one rank: heads are divided, at least one per rank."""
    return layer.cached // layer.cache_heads * max(1, layer.cache_heads // ranks) * element_bytes


def gib(size: int) -> str:
    """Format as vLLM does."""
    return f"{round(size / GIB, 2)}"
