"""Paging of vLLM's KV cache into blocks, in vLLM's own integer arithmetic.

Layers with equal caches form a group. All groups take blocks from one pool; a block holds one page
of each layer of a group. Pages are equally large: a layer with less per token has more tokens in
one. A recurrent layer stores its state in a page, and attention's pages grow until one is as large.
A test compares this with the installed vLLM's own functions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from autotune.core.units import GIB
from autotune.estimate.model_shape import Layer, Shape

BLOCK_TOKENS = 16  # vLLM's default
LATENT_BLOCK_TOKENS = 64  # of latent attention's kernels
STATE_BLOCKS = 2  # per sequence and group of recurrent layers: running, and at the last whole block (prefix caching)
WIDE_STATE_BYTES = 4  # per element of a state in float32

MANUAL = "https://docs.vllm.ai/en/latest/configuration/conserving_memory/"


@dataclass(frozen=True, kw_only=True)
class Pages:
    """Cache of one engine on one rank."""

    windows: tuple[int | None, ...]  # attention window of each group; None: unlimited
    block_bytes: int  # bytes of one block in the pool
    block_tokens: int  # of the layers with the most per token
    group_tokens: tuple[int, ...]  # tokens per block of each group; 0: recurrent layers
    in_flight_tokens: int  # tokens scheduled but not finished: a window's blocks are freed only afterwards

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
                "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine "
                "(this flag also controls CPU memory reservation on the CPU backend, despite its name). "
                f"See {MANUAL} for more details."
            )
        if self.needed(length) <= usable:
            return None
        needed, longest = self.needed(length), self.longest(available, length)
        estimated = f"Based on the available memory, the estimated maximum model length is {longest}. " if longest else ""
        return (
            f"To serve at least one request with the model's max seq len ({length}), ({gib(needed)} GiB KV cache is needed, "
            f"which is larger than the available KV cache memory ({gib(usable)} GiB). {estimated}"
            "Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
            f"`max_model_len` when initializing the engine. See {MANUAL} for more details."
        )


@lru_cache(256)
def pages(
    shape: Shape, *, element_bytes: int, tensor_parallel: int, max_num_batched_tokens: int, concurrent_batches: int = 2
) -> Pages:
    """Return the paging on one rank. One batch runs while the next is scheduled."""
    latent = all(layer.cache_heads == 1 and layer.key_value == 0 for layer in shape.layers)
    smallest = LATENT_BLOCK_TOKENS if latent else BLOCK_TOKENS
    layers = [layer for layer in shape.layers if layer.cached or layer.state or layer.wide_state]
    page = max(bytes_per_token(layer, element_bytes, tensor_parallel) for layer in layers)
    state = max((layer.state * element_bytes + layer.wide_state * WIDE_STATE_BYTES) // tensor_parallel for layer in layers)
    block_tokens = smallest * max(1, -(-state // (smallest * page)))

    def tokens(layer: Layer) -> int:
        return block_tokens * (page // bytes_per_token(layer, element_bytes, tensor_parallel)) if layer.cached else 0

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
