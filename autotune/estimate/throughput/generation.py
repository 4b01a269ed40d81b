"""Seconds of generating completions.

seconds = prefill + tokens per sequence · (sequences / batch) · step

A step makes one token of each running sequence: it reads the weights and every cache once. An
engine decodes a batch of sequences and starts the next one when one is done. transformers decodes
its whole batch together, and the host's work per layer dominates small batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.catalog.constants import efficiency
from autotune.core.composition import Composition
from autotune.core.prediction import Estimate, highest
from autotune.core.trace import Inventory
from autotune.estimate import model_shape
from autotune.estimate.model_shape import Layer, Shape, dtype_bytes
from autotune.estimate.throughput import roofline
from autotune.estimate.throughput.roofline import MICRO, MILLI, Ceilings
from autotune.estimate.vllm_engine import TRL_BATCHED_TOKENS
from autotune.estimate.vllm_weights import quantisation, quantised_bytes

CACHE_SLOWDOWN = 4  # upper bound of transformers' time over its cache, relative to an ordered copy
EXCHANGES_PER_LAYER = 2  # tensor parallelism reduces after attention and after the MLP
SHARDS_WEIGHTS = frozenset({"zero3", "fsdp1", "fsdp2"})


@dataclass(frozen=True, kw_only=True)
class GenerationLoad:
    """Completions that one engine, or one rank's own model, generates in a cycle."""

    config: Mapping[str, object]
    dtype: str
    sequences: int
    prompts: int  # distinct prompts: an engine reads a shared one once
    prompt_length: int
    completion_length: int
    batch: int  # sequences decoded together
    by_engine: bool
    tensor_parallel: int = 1
    quantised_bits: int | None = None
    of_batch: int = 0  # completions of all engines, or ranks, of which the slowest ends the rollout

    @property
    def together(self) -> int:
        return max(1, min(self.batch, self.sequences))


def seconds(load: GenerationLoad, device: Ceilings) -> Estimate:
    """Return the time of a whole cycle's completions."""
    return prefill(load, device) + step(load, device).scaled(load.sequences * load.completion_length / load.together)


def step(load: GenerationLoad, device: Ceilings) -> Estimate:
    """Return the time of one token of each running sequence, halfway through its completion."""
    return one_pass(load, device, together=load.together, length=load.prompt_length + load.completion_length / 2)


def prefill(load: GenerationLoad, device: Ceilings) -> Estimate:
    """Return the time of reading the prompts: 2 · tokens · parameters + attention; the head for the last tokens alone."""
    shape = model_shape.shape(load.config)
    prompts = load.prompts if load.by_engine else load.sequences
    tokens = prompts * load.prompt_length
    products = 2.0 * tokens * (shape.active_parameters - shape.head) + 2.0 * prompts * shape.hidden * shape.vocabulary
    attention = sum(count * _attention(shape, layer, load.prompt_length) for layer, count in shape.kinds) * prompts
    work = roofline.compute_seconds({load.dtype: (products + attention) / load.tensor_parallel}, device)
    passes = max(1.0, tokens / TRL_BATCHED_TOKENS) if load.by_engine else 1.0
    return highest((work, roofline.memory_seconds(passes * _weight_bytes(load, shape), device)))


def _attention(shape: Shape, layer: Layer, length: int) -> float:
    """4 · length · (length / 2, or the window) · heads · head_dim; recurrent: 4 · length · state"""
    if layer.state or layer.wide_state:
        return 4.0 * length * (layer.state + layer.wide_state)
    seen = length / 2 if layer.window is None else min(length / 2, layer.window)
    return 4.0 * length * seen * shape.heads * shape.head_dim


def one_pass(load: GenerationLoad, device: Ceilings, *, together: int, length: float, prefilled: int = 0) -> Estimate:
    """Return the time of one pass. together: decoding sequences; length: their mean length; prefilled: prompt tokens."""
    # 1. The device: max(reading weights and caches, products).
    shape = model_shape.shape(load.config)
    size, tokens = dtype_bytes(load.dtype), together + prefilled
    read = sum(count * _cache_read(shape, layer, length, by_engine=load.by_engine) for layer, count in shape.kinds)
    cache = roofline.memory_seconds(together * read * size / load.tensor_parallel, device, share="decode_memory_share")
    if not load.by_engine:
        cache = Estimate(value=cache.value, low=cache.low, high=CACHE_SLOWDOWN * cache.high)
    weights = roofline.memory_seconds(_weight_bytes(load, shape, tokens), device, share="decode_memory_share")
    products = 2.0 * tokens * shape.active_parameters / load.tensor_parallel
    busy = highest((weights + cache, roofline.compute_seconds({load.dtype: products}, device)))
    # 2. The host.
    layers = len(shape.layers)
    if not load.by_engine:
        # It waits once per token: concurrent at best, sequential at worst.
        host = roofline.overhead_seconds(layers, efficiency("generate_layer_microseconds"), MICRO)
        both = highest((busy, host))
        return Estimate(value=both.value, low=both.low, high=busy.high + host.high)
    own = roofline.overhead_seconds(1, efficiency("engine_step_milliseconds"), MILLI)
    own = own + roofline.overhead_seconds(layers, efficiency("engine_layer_microseconds"), MICRO)
    # 3. Exchanges between the engine's ranks.
    exchanges = Estimate.exactly(0)
    if load.tensor_parallel > 1:
        count = EXCHANGES_PER_LAYER * layers
        exchanges = roofline.overhead_seconds(count, efficiency("exchange_microseconds"), MICRO)
        payload = roofline.link_seconds(2.0 * count * tokens * shape.hidden * size, device)
        exchanges = exchanges if payload is None else exchanges + payload
    return busy + own + exchanges


def _cache_read(shape: Shape, layer: Layer, length: float, *, by_engine: bool) -> float:
    """Elements of one sequence's cache that a step moves; `cat`: three times."""
    if layer.state or layer.wide_state:
        return 2.0 * (layer.state + 2 * layer.wide_state)  # read and written; float32 counts twice
    seen = length if layer.window is None else min(length, layer.window)
    return seen * (layer.cached if by_engine else 3 * shape.unfolded)


def _weight_bytes(load: GenerationLoad, shape: Shape, together: int | None = None) -> float:
    """Weights that one pass reads on one rank, unused experts excluded."""
    size = dtype_bytes(load.dtype)
    outside = (shape.head or shape.embedding) * size
    per_weight = quantised_bytes(load.quantised_bits, quantisation(load.config)) if load.quantised_bits else size
    inside = sum(count * _read_parameters(layer, together) for layer, count in shape.kinds) * per_weight
    return (outside + inside) / load.tensor_parallel


def _read_parameters(layer: Layer, together: int | None) -> float:
    """parameters - experts · (1 - used / experts)^together"""
    if not layer.experts or together is None:
        return layer.parameters
    missed = (1 - layer.experts_used / layer.experts) ** together
    return layer.parameters - layer.experts * missed


def with_gathering(
    rollout: Estimate, inventory: Inventory, composition: Composition, load: GenerationLoad, layers: int, device: Ceilings
) -> Estimate | None:
    """Add the gathering of sharded weights, if the trainer's own model generates.

    Once per rollout, all weights; or layer by layer for every token, if they do not fit
    (`ds3_gather_for_generation=false`). None: every token crosses a link of unknown speed.
    """
    ranks = composition.ranks
    if composition.generation != "trainer" or ranks < 2 or composition.sharded_by not in SHARDS_WEIGHTS:
        return rollout
    passes = 1
    if composition.gathers_per_token:  # per batch, one for the prompts and one for every token after the first
        passes = math.ceil(load.sequences / max(1, load.batch)) * max(1, load.completion_length)
    sent = roofline.link_seconds(passes * inventory.weight_bytes * (ranks - 1) / ranks, device)
    if sent is None:
        return None if composition.gathers_per_token else rollout
    whole = sent + roofline.overhead_seconds(passes * layers, efficiency("exchange_microseconds"), MICRO)
    # At best the next layer is gathered while this one computes.
    return Estimate(value=rollout.value + whole.value, low=highest((rollout, whole)).low, high=rollout.high + whole.high)
