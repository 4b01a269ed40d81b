"""Weights and cache of a vLLM engine on one rank.

Weights: in vLLM's layout, and in the blocks into which they are loaded. With ranks r of tensor
parallelism and e of expert parallelism, a layer's parameters on one rank are

    on rank  = (split - experts) / r + experts / e + key_value · heads on rank / heads + copied
    matrices = on rank · share of the layer's parameters that are in linear layers
    bytes    = matrices · bytes per quantised weight + (on rank - matrices) · bytes per element

Cache: paged into blocks, in vLLM's own integer arithmetic. Layers with equal caches form a group.
All groups take blocks from one pool; a block holds one page of each layer of a group. Pages are
equally large: a layer with less per token has more tokens in one. A recurrent layer stores its
state in a page, and attention's pages grow until one is as large. A test compares this with the
installed vLLM's own functions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from autotune.core.units import GIB, MIB
from autotune.estimate.allocator import AllocatorSettings, CachingAllocator
from autotune.estimate.layer_shape import Layer
from autotune.estimate.model_shape import Shape, dtype_bytes

MAX_CACHED = 256  # results per function: thousands of candidates share a few shapes and settings
VOCABULARY_MULTIPLE = 64  # vLLM pads the vocabulary to it

FLOAT32_BYTES = 4
WEIGHTS_PER_STATISTIC = 64  # bitsandbytes, 4 bits

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
    tables = 2 if shape.head else 1
    outside = table_bytes(shape, 1, tensor_parallel) * tables
    outside += shape.layer_embeddings + shape.final_norm + shape.towers
    outside += shape.rotary_rows * shape.rotary_dim

    per_weight: float = size
    if quantised_bits is not None:
        per_weight = quantised_bytes(quantised_bits, method)
    expert_ranks = max(tensor_parallel, expert_parallel)
    total = outside * size
    for layer in shape.layers:
        total += _layer_bytes(layer, size, tensor_parallel, expert_ranks, per_weight)
    return total


def table_bytes(
    shape: Shape,
    size: int,
    ranks: int,
) -> int:
    """Bytes of this rank's part of the embedding."""
    vocabulary = -(-shape.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return vocabulary * shape.hidden // ranks * size


ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of a slot: an adapter's is rounded up."""


@lru_cache(MAX_CACHED)
def adapter_slot_bytes(
    shape: Shape,
    size: int,
    ranks: int,
    rank: int,
) -> int:
    """Bytes of one slot for adapters: A and B of every product of a layer, targeted or not, without
    experts.

    B of products that are split by columns, and A of those split by rows, have a rank's part.
    (`lora/layers/base_linear.py`, vLLM 0.26.)
    """
    slot = next((slot_rank for slot_rank in ADAPTER_RANKS if slot_rank >= rank), rank)
    queries = shape.heads * shape.head_dim
    keys = shape.key_value_heads * shape.head_dim
    joint = 3 * shape.hidden + (queries + 2 * keys) // ranks  # queries, keys and values
    output = queries // ranks + shape.hidden
    elements = len(shape.layers) * (joint + output)
    for layer in shape.layers:
        if layer.width:
            elements += 3 * shape.hidden + 3 * layer.width // ranks
    return slot * size * elements


def _layer_bytes(
    layer: Layer,
    size: int,
    ranks: int,
    expert_ranks: int,
    per_weight: float,
) -> int:
    heads = max(1, layer.cache_heads // ranks) / layer.cache_heads
    dense = (layer.split - layer.experts) / ranks
    on_rank = dense + layer.experts / expert_ranks + layer.key_value * heads + layer.copied
    matrices = on_rank * layer.matrices / layer.parameters
    return round(matrices * per_weight + (on_rank - matrices) * size)


def quantised_bytes(bits: int, method: str | None = None) -> float:
    """Bytes per weight with scales: AWQ and GPTQ: half precision and a zero point per 128 weights;
    bitsandbytes: float32 per 64 after loading; 8 bits: one per channel (not counted)."""
    if bits != 4:
        return bits / 8
    if method in ("awq", "gptq"):
        return bits / 8 + (2 + 0.5) / 128
    return bits / 8 + FLOAT32_BYTES / WEIGHTS_PER_STATISTIC


def quantisation(config: Mapping[str, object]) -> str | None:
    """Return the quantisation method that the model's own config names."""
    stated = config.get("quantization_config")
    if not isinstance(stated, Mapping):
        return None
    method = stated.get("quant_method")
    return method if isinstance(method, str) else None


# Blocks into which weights are loaded.


@dataclass(frozen=True, kw_only=True)
class LoadedBlocks:
    """Memory that an engine's weights take beyond their size, by the blocks into which they are
    loaded.
    """

    unsplit_bytes: int = 0  # ends of blocks: larger ones are rounded up to 2 MiB and not split
    open_bytes: int = 0  # free parts of segments that hold a weight
    left_bytes: int = 0  # segments that are free


@lru_cache(MAX_CACHED)
def loaded_in_blocks(
    shape: Shape,
    size: int,
    ranks: int,
) -> LoadedBlocks:
    """Return the blocks of weights that are loaded as they are."""
    allocator = CachingAllocator(LOADING)
    for number, elements in enumerate(_matrices(shape, ranks)):
        allocator.malloc(number, elements * size)
    return LoadedBlocks(
        unsplit_bytes=allocator.allocated - allocator.requested,
        open_bytes=allocator.reserved - allocator.allocated,
    )


def _matrices(shape: Shape, ranks: int) -> Iterator[int]:
    """Yield elements of the fused matrices, in the order in which they are made; latent
    attention has others.
    """
    table = table_bytes(shape, 1, ranks)
    yield table
    for layer in shape.layers:
        if layer.cached == 2 * shape.key_value_heads * shape.head_dim:
            attention = _fused(shape, layer, ranks)
            yield attention.joint
            yield attention.output
        for width in (layer.width, layer.expert_width * _expert_count(shape, layer)):
            if width:
                yield 2 * width * shape.hidden // ranks  # gate and up projection
                yield width * shape.hidden // ranks
    if shape.head:
        yield table


def _expert_count(shape: Shape, layer: Layer) -> int:
    if not layer.expert_width:
        return 0
    return layer.experts // (3 * layer.expert_width * shape.hidden)


@lru_cache(MAX_CACHED)
def quantised_in_blocks(
    shape: Shape,
    size: int,
    ranks: int,
    *,
    makes_head_first: bool,
) -> LoadedBlocks:
    """Return the blocks of dense layers once bitsandbytes has quantised them.

    Each matrix is read as it is, packed, and freed after the next one is there; its statistics are
    made in 32 bits, kept in 8, and written back in 32. A free segment of 20 MiB is not split, so
    that nothing smaller finds room in it: each layer leaves some.
    """
    loading = _QuantisedLoading(size)
    table = table_bytes(shape, size, ranks)
    # 1. Parameters, packed, and the rotary tables.
    loading.make(table)
    for index, layer in enumerate(shape.layers):
        attention = _fused(shape, layer, ranks)
        loading.make_packed(attention.joint, attention.output)
        if index == 0:
            loading.make_rotary_tables(shape.rotary_rows * shape.rotary_dim)
        loading.make_packed(attention.gate_and_up, attention.down)
    if shape.head or makes_head_first:
        head = loading.make(table)
        if not shape.head:
            loading.free(head)

    # 2. One matrix of the checkpoint after the other; then the statistics of fused matrices.
    matrices: list[int] = []
    for layer in shape.layers:
        matrices += _separate(shape, layer, ranks)
    loading.quantise(matrices)

    # 3. The engine empties its cache.
    reserved = loading.allocator.reserved
    loading.allocator.empty_cache()
    return LoadedBlocks(
        unsplit_bytes=loading.allocator.allocated - loading.allocator.requested,
        open_bytes=loading.allocator.reserved - loading.allocator.allocated,
        left_bytes=reserved - loading.allocator.reserved,
    )


class _QuantisedLoading:
    """Allocations of bitsandbytes' loader in vLLM, one after the other."""

    def __init__(self, size: int) -> None:
        self.allocator = CachingAllocator(LOADING)
        self._numbers = itertools.count()
        self._size = size  # bytes per element of the checkpoint

    def make(self, size: float) -> int:
        number = next(self._numbers)
        self.allocator.malloc(number, int(size))
        return number

    def free(self, number: int | None) -> None:
        if number is not None:
            self.allocator.free(number)

    def make_packed(self, *elements: int) -> None:
        """Make the parameters of fused matrices: two weights a byte."""
        for count in elements:
            self.make(count / 2)

    def make_rotary_tables(self, elements: int) -> None:
        """Make angles, cosines and sines, both together, and both in the model's dtype; only the
        last stays.
        """
        half = elements * FLOAT32_BYTES // 2
        parts = [self.make(half), self.make(half), self.make(half)]
        joined = self.make(elements * FLOAT32_BYTES)
        for part in parts:
            self.free(part)
        self.make(elements * self._size)
        self.free(joined)

    def quantise(self, matrices: Iterable[int]) -> None:
        """Read and pack matrices of these sizes; write their statistics back in the end."""
        read: int | None = None
        packed: int | None = None
        statistics: list[tuple[int, int]] = []  # in 8 bits, and the matrix's elements
        for elements in matrices:
            earlier = read
            read = self.make(elements * self._size)
            self.free(earlier)
            wide = self.make(elements * FLOAT32_BYTES / WEIGHTS_PER_STATISTIC)
            earlier = packed
            result = self.make(elements / 2)
            statistics.append((self.make(elements / WEIGHTS_PER_STATISTIC), elements))
            self.free(wide)
            self.free(earlier)
            packed = result
        self.free(read)
        self.free(packed)
        for narrow, elements in statistics:
            self.make(elements * FLOAT32_BYTES / WEIGHTS_PER_STATISTIC)
            self.free(narrow)


@lru_cache(MAX_CACHED)
def dequantised_bytes(
    shape: Shape,
    size: int,
    ranks: int,
) -> int:
    """Segments in which bitsandbytes dequantises the matrices of a layer, one after the other: a
    captured graph keeps them.
    """
    allocator = CachingAllocator()
    number = 0
    for layer in dict.fromkeys(shape.layers):
        for elements in _separate(shape, layer, ranks):
            allocator.malloc(number, elements * size)
            allocator.free(number)
            number += 1
    return allocator.reserved


@dataclass(frozen=True, kw_only=True)
class _FusedMatrices:
    """Elements of a dense layer's four fused matrices."""

    joint: int  # queries, keys and values
    output: int
    gate_and_up: int
    down: int


def _fused(
    shape: Shape,
    layer: Layer,
    ranks: int,
) -> _FusedMatrices:
    queries, keys, values, output, gate, up, down = _separate(shape, layer, ranks)
    return _FusedMatrices(
        joint=queries + keys + values,
        output=output,
        gate_and_up=gate + up,
        down=down,
    )


def _separate(
    shape: Shape,
    layer: Layer,
    ranks: int,
) -> tuple[int, ...]:
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
CLOSE_COUNTS = 1.5  # ratio of layer counts up to which groups have the commonest kind's
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
        blocks = 0
        for window, tokens in zip(self.windows, self.group_tokens, strict=True):
            if not tokens:
                blocks += STATE_BLOCKS
            elif window is None:
                blocks += -(-length // tokens)
            else:  # a window can begin in the middle of a block
                window_tokens = min(window - 1 + self.in_flight_tokens, length)
                blocks += -(-window_tokens // tokens) + 1
        return blocks

    def needed(self, length: int) -> int:
        """Bytes for one sequence of this length."""
        return self.block_bytes * self.blocks_per_sequence(length)

    def usable(self, available: int) -> int:
        """Bytes for sequences: one block is reserved as the null block."""
        return available - self.block_bytes

    def longest(self, available: int, at_most: int) -> int:
        """Return the longest sequence, up to `at_most`, that fits; 0: none."""
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            if self.needed(middle) <= self.usable(available):
                low = middle
            else:
                high = middle - 1
        return low

    def concurrency(self, available: int, length: int) -> float:
        """Sequences of this length that fit at a time."""
        return self.blocks(available) / self.blocks_per_sequence(length)

    def tokens(self, available: int, length: int) -> int:
        """Cache size in tokens, as vLLM logs it."""
        return int(self.concurrency(available, length) * length)

    def refusal(self, available: int, length: int) -> str | None:
        """Return vLLM's error message if the cache is too small for one sequence of this length."""
        usable = self.usable(available)
        needed = self.needed(length)
        if usable <= 0:
            return (
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"
                " when initializing the engine (this flag also controls CPU memory reservation on"
                f" the CPU backend, despite its name). See {MANUAL} for more details."
            )
        if needed <= usable:
            return None
        estimated = ""
        if longest := self.longest(available, length):
            estimated = (
                f"Based on the available memory, the estimated maximum model length is {longest}. "
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
    # 1. A page: the tokens of a block in the layer with the most per token. It holds a state.
    layers = [layer for layer in shape.layers if layer.cached or layer.state or layer.wide_state]
    token_bytes = max(bytes_per_token(layer, element_bytes, tensor_parallel) for layer in layers)
    state_bytes = max(_state_bytes(layer, element_bytes) // tensor_parallel for layer in layers)
    smallest = LATENT_BLOCK_TOKENS if _is_latent(shape) else BLOCK_TOKENS
    block_tokens = smallest * max(1, -(-state_bytes // (smallest * token_bytes)))

    def tokens_in_page(layer: Layer) -> int:
        if not layer.cached:
            return 0
        own_bytes = bytes_per_token(layer, element_bytes, tensor_parallel)
        return block_tokens * (token_bytes // own_bytes)

    # 2. Layers per group: the rarest kind's count, or a close commonest.
    kinds = Counter((layer.window, tokens_in_page(layer)) for layer in layers)
    rarest = min(kinds.values())
    commonest = max(kinds.values())
    layers_per_group = commonest if commonest < rarest * CLOSE_COUNTS else rarest
    windows: list[int | None] = []
    group_tokens: list[int] = []
    for (window, tokens), count in kinds.items():
        groups = -(-count // layers_per_group)
        windows += [window] * groups
        group_tokens += [tokens] * groups
    return Pages(
        windows=tuple(windows),
        block_bytes=token_bytes * block_tokens * layers_per_group,
        block_tokens=block_tokens,
        group_tokens=tuple(group_tokens),
        in_flight_tokens=concurrent_batches * max_num_batched_tokens,
    )


def _is_latent(shape: Shape) -> bool:
    return all(layer.cache_heads == 1 and layer.key_value == 0 for layer in shape.layers)


def _state_bytes(layer: Layer, element_bytes: int) -> int:
    return layer.state * element_bytes + layer.wide_state * WIDE_STATE_BYTES


def bytes_per_token(
    layer: Layer,
    element_bytes: int,
    ranks: int,
) -> int:
    """Bytes per token of one layer on one rank: heads are divided, at least one per rank."""
    heads = max(1, layer.cache_heads // ranks)
    return layer.cached // layer.cache_heads * heads * element_bytes


def gib(size: int) -> str:
    """Format as vLLM does."""
    return f"{round(size / GIB, 2)}"
