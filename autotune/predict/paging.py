"""Paging: how vLLM divides memory for its cache into blocks, in its own integer arithmetic.

Layers that cache alike form a group; every group takes blocks from one pool, and a block holds one page of each layer of
a group. A test runs the installed vLLM's own functions beside these.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from autotune.predict.shapes import Shape
from autotune.units import GIB

BLOCK_TOKENS = 16
"""vLLM's own default; a latent cache is paged by its kernels' 64."""

LATENT_BLOCK_TOKENS = 64

MANUAL = "https://docs.vllm.ai/en/latest/configuration/conserving_memory/"


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The cache of one engine on one rank."""

    windows: tuple[int | None, ...]
    """One entry for each group: how far back its layers look, None for all the way."""

    block_bytes: int
    """What one block takes from the pool."""

    block_tokens: int
    in_flight_tokens: int
    """Tokens that can be scheduled and not yet settled: a window's blocks are freed only after that."""

    def blocks(self, available: int) -> int:
        """How many the pool has."""
        return max(available, 0) // self.block_bytes

    def blocks_per_sequence(self, length: int) -> int:
        """Blocks that a sequence of this length can hold at a time."""
        return sum(self._group_blocks(window, length) for window in self.windows)

    def needed(self, length: int) -> int:
        """Bytes for one sequence of this length."""
        return self.block_bytes * self.blocks_per_sequence(length)

    def longest(self, available: int, at_most: int) -> int:
        """The longest sequence, up to `at_most`, that the memory holds; 0 for not even one token."""
        usable = available - self.block_bytes  # one block stands for nothing and is never given out
        low, high = 0, at_most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.needed(middle) <= usable else (low, middle - 1)
        return low

    def concurrency(self, available: int, length: int) -> float:
        """Sequences of this length that fit at a time."""
        return self.blocks(available) / self.blocks_per_sequence(length)

    def tokens(self, available: int, length: int) -> int:
        """What vLLM logs as the size of its cache."""
        return int(self.concurrency(available, length) * length)

    def refusal(self, available: int, length: int) -> str | None:
        """What vLLM raises when the cache is too small for one sequence of this length."""
        usable = available - self.block_bytes
        if usable <= 0:
            return _no_memory()
        if self.needed(length) <= usable:
            return None
        return _too_long(length, self.needed(length), usable, self.longest(available, length))

    def _group_blocks(self, window: int | None, length: int) -> int:
        if window is None:
            return -(-length // self.block_tokens)
        held = min(window - 1 + self.in_flight_tokens, length)
        return -(-held // self.block_tokens) + 1  # a window can begin in the middle of a block


@lru_cache(256)
def pages(
    shape: Shape, *, element_bytes: int, tensor_parallel: int, max_num_batched_tokens: int, concurrent_batches: int = 2
) -> Pages:
    """How the cache of this model is paged on one rank. While one batch runs the next is scheduled: two at a time."""
    latent = all(layer.cache_heads == 1 and layer.key_value == 0 for layer in shape.layers)
    block_tokens = LATENT_BLOCK_TOKENS if latent else BLOCK_TOKENS
    page = max(_page_bytes(layer.cached, layer.cache_heads, tensor_parallel) for layer in shape.layers)
    windows, layers_per_group = _groups(Counter(layer.window for layer in shape.layers))
    return Pages(
        windows=windows,
        block_bytes=page * element_bytes * block_tokens * layers_per_group,
        block_tokens=block_tokens,
        in_flight_tokens=concurrent_batches * max_num_batched_tokens,
    )


def _page_bytes(cached: int, heads: int, tensor_parallel: int) -> int:
    """Elements per token and layer on one rank: heads are divided, and one is the least."""
    return cached // heads * max(1, heads // tensor_parallel)


def _groups(kinds: Counter[int | None]) -> tuple[tuple[int | None, ...], int]:
    """Layers of each kind are cut into groups of one size: the rarest kind's count, or the commonest's where they are close."""
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < fewest * 1.5 else fewest
    return tuple(window for window, count in kinds.items() for _ in range(-(-count // size))), size


def gib(size: int) -> str:
    """As vLLM writes it."""
    return f"{round(size / GIB, 2)}"


def _no_memory() -> str:
    return (
        "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine "
        "(this flag also controls CPU memory reservation on the CPU backend, despite its name). "
        f"See {MANUAL} for more details."
    )


def _too_long(length: int, needed: int, available: int, longest: int) -> str:
    estimated = f"Based on the available memory, the estimated maximum model length is {longest}. " if longest else ""
    return (
        f"To serve at least one request with the model's max seq len ({length}), ({gib(needed)} GiB KV cache is needed, "
        f"which is larger than the available KV cache memory ({gib(available)} GiB). {estimated}"
        "Try increasing `gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
        f"`max_model_len` when initializing the engine. See {MANUAL} for more details."
    )
