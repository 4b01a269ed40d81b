"""CUDA graphs as a vLLM engine estimates them before it makes its cache (0.21 and later).

It captures the two largest batches of each kind, with graphs of pieces and whole ones:

    estimate = first capture + (graphs - kinds) · MIN_GRAPH_BYTES
    first    = cuBLAS's workspace of the capturing stream + what stays of its warm-up + private pool

The second capture of a kind finds the blocks of the first one. A driver may take more for a graph
than the minimum; `catalog/efficiency.yaml` has its bounds (`engine_graph_piece_kib`).
(`profile_cudagraph_memory` in vLLM's `gpu_model_runner.py`, 0.26.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autotune.catalog import efficiency
from autotune.core.prediction import Estimate
from autotune.core.units import KIB, MIB
from autotune.estimate.allocator import CachingAllocator, segment_bytes
from autotune.estimate.allocator_blocks import SMALL_SEGMENT
from autotune.estimate.engine_memory import MAX_CACHED
from autotune.estimate.engine_passes import NOTHING, captured_sizes
from autotune.estimate.layer_shape import Layer
from autotune.estimate.model_shape import Shape

MIN_GRAPH_BYTES = MIB  # vLLM counts at least this for a graph
GRAPH_KINDS = 2  # of the pieces between two attentions, and of whole passes
CAPTURED_LAYERS = 3  # layers after which the pool does not grow


@lru_cache(MAX_CACHED)
def estimated_graph_bytes(
    shape: Shape,
    size: int,
    ranks: int,
    sequences: int,
    tokens: int,
    workspace_bytes: int,
) -> Estimate:
    """Return vLLM's own estimate."""
    sizes = captured_sizes(sequences, tokens)
    if not sizes:
        return NOTHING
    pool = _captured_pool(shape, size, ranks, sizes[-1])
    # cuBLASLt's workspace holds one small segment of the warm-up.
    first_capture = segment_bytes(workspace_bytes) + SMALL_SEGMENT + pool

    whole_graphs = [captured for captured in sizes if captured <= sequences]
    further = len(sizes) + len(whole_graphs) - GRAPH_KINDS
    largest_graph = len(shape.layers) * efficiency("engine_graph_piece_kib").high * KIB
    return Estimate(
        value=first_capture + further * MIN_GRAPH_BYTES,
        low=first_capture + further * MIN_GRAPH_BYTES,
        high=first_capture + further * max(MIN_GRAPH_BYTES, largest_graph),
    )


def _captured_pool(
    shape: Shape,
    size: int,
    ranks: int,
    tokens: int,
) -> int:
    """Return the segments of the private pool after one batch of this many tokens."""
    capture = _Capture(shape, size * tokens, ranks)
    for layer in shape.layers[:CAPTURED_LAYERS]:
        capture.layer(layer)
    return capture.allocator.reserved


@dataclass(kw_only=True)
class _LiveStates:
    """Allocations that the next layer reads."""

    residual: int
    attended: int


class _Capture:
    """Allocations of the compiled pieces of a pass, in the order of vLLM's decoder layers."""

    def __init__(
        self,
        shape: Shape,
        column_bytes: int,
        ranks: int,
    ) -> None:
        self.allocator = CachingAllocator()
        self._count = 0
        self._ranks = ranks
        self._column_bytes = column_bytes  # of one element of every token
        self._hidden = shape.hidden
        self._rotary = shape.rotary_dim
        self._joint = (shape.heads + 2 * shape.key_value_heads) * shape.head_dim // ranks
        residual = self._make(self._hidden)
        normed = self._make(self._hidden)
        joint, rotary = self._make(self._joint), self._make(self._rotary)
        self._live = _LiveStates(residual=residual, attended=self._make(self._hidden))
        self._free(rotary, joint, normed)

    def layer(self, layer: Layer) -> None:
        """Capture from one attention to the next one."""
        # 1. The output projection, and the MLP.
        projected, normed = self._make(self._hidden), self._make(self._hidden)
        joint_width, width = self._widths(layer)
        gate_and_up = self._make(joint_width)
        self._free(normed)
        active = self._make(width)
        self._free(gate_and_up)
        down = self._make(self._hidden)
        self._free(active)

        # 2. Queries, keys and values of the next layer. Its attention writes into `down`.
        residual, normed = self._make(self._hidden), self._make(self._hidden)
        self._free(projected)
        joint, rotary = self._make(self._joint), self._make(self._rotary)
        self._free(self._live.attended, self._live.residual)
        self._free(rotary, joint, normed)
        self._live = _LiveStates(residual=residual, attended=down)

    def _widths(self, layer: Layer) -> tuple[int, int]:
        """Return elements of a token before and after the MLP's activation."""
        width = layer.width // self._ranks
        if not layer.expert_width:
            return 2 * width, width
        expert_width = layer.expert_width // self._ranks
        chosen = layer.experts_per_token
        wide = chosen * max(2 * expert_width, self._hidden)
        narrow = chosen * max(expert_width, self._hidden)
        return max(2 * width, wide), max(width, narrow)

    def _make(self, elements: int) -> int:
        self._count += 1
        self.allocator.malloc(self._count, elements * self._column_bytes)
        return self._count

    def _free(self, *numbers: int) -> None:
        for number in numbers:
            self.allocator.free(number)
