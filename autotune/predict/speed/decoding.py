"""Decoding: seconds of writing completions.

A token of each running sequence costs one reading of the weights and of everybody's cache; the prompts cost their matrix
products. An engine decodes so many sequences at a time and fetches the next when one is done; transformers decodes its whole
batch together, and its host's bookkeeping per layer is most of the time for small batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.catalogue.efficiency import efficiency
from autotune.predict import shapes
from autotune.predict.engine import TRL_BATCHED_TOKENS, quantisation, quantised_bytes
from autotune.predict.shapes import Layer, Shape, dtype_bytes
from autotune.predict.speed.ceilings import Ceilings, computing, crossing, each, longer, moving
from autotune.prediction import Estimate

MICRO, MILLI = 1e-6, 1e-3
CARELESS = 4
"""How many times longer transformers can take over its cache than copying it in order would."""

EXCHANGES_PER_LAYER = 2
"""Tensor parallelism adds up after attention and after the MLP."""


@dataclass(frozen=True, kw_only=True)
class Writing:
    """What one engine, or one rank's own model, has to write in a cycle."""

    config: Mapping[str, object]
    dtype: str
    sequences: int
    prompts: int
    """Different prompts among them: an engine reads a shared one once."""

    prompt_length: int
    completion_length: int
    at_a_time: int
    """Sequences that are decoded together."""

    by_engine: bool
    tensor_parallel: int = 1
    quantised_bits: int | None = None


def seconds(writing: Writing, device: Ceilings) -> Estimate:
    """Of the whole cycle's completions."""
    shape = shapes.shape(writing.config)
    return _prefill(writing, shape, device) + _decode(writing, shape, device)


def step(writing: Writing, device: Ceilings) -> Estimate:
    """One token of each sequence that is decoded at a time, halfway through its completion."""
    return _step(writing, shapes.shape(writing.config), device, max(1, min(writing.at_a_time, writing.sequences)))


def _prefill(writing: Writing, shape: Shape, device: Ceilings) -> Estimate:
    prompts = writing.prompts if writing.by_engine else writing.sequences
    tokens = prompts * writing.prompt_length
    products = 2.0 * tokens * (shape.active_parameters - shape.head) + 2.0 * prompts * shape.hidden * shape.vocabulary
    attention = sum(count * _attention(shape, layer, writing.prompt_length) for layer, count in shape.kinds) * prompts
    work = computing({writing.dtype: (products + attention) / writing.tensor_parallel}, device)
    passes = max(1.0, tokens / TRL_BATCHED_TOKENS) if writing.by_engine else 1.0
    return longer(work, moving(passes * _weight_bytes(writing, shape), device))


def _attention(shape: Shape, layer: Layer, length: int) -> float:
    """Scores and their sums over a causal triangle, or a band where there is a window."""
    seen = length / 2 if layer.window is None else min(length / 2, layer.window)
    return 4.0 * length * seen * shape.heads * shape.head_dim


def _decode(writing: Writing, shape: Shape, device: Ceilings) -> Estimate:
    together = max(1, min(writing.at_a_time, writing.sequences))
    return _step(writing, shape, device, together).scaled(writing.sequences * writing.completion_length / together)


def _step(writing: Writing, shape: Shape, device: Ceilings, together: int) -> Estimate:
    """One token of each running sequence, at half of its completion."""
    length = writing.prompt_length + writing.completion_length / 2
    size = dtype_bytes(writing.dtype)
    read = sum(count * _cache_read(shape, layer, length, by_engine=writing.by_engine) for layer, count in shape.kinds)
    cache = together * read * size
    weights = _weight_bytes(writing, shape, together)
    products = 2.0 * together * shape.active_parameters / writing.tensor_parallel
    reading = moving(weights, device, share="decode_memory_share") + _going_through(cache, writing, device)
    busy = longer(reading, computing({writing.dtype: products}, device))
    layers = len(shape.layers)
    if not writing.by_engine:
        return _taking_turns(busy, each(layers, efficiency("generate_layer_microseconds"), MICRO))
    own = each(1, efficiency("engine_step_milliseconds"), MILLI) + each(layers, efficiency("engine_layer_microseconds"), MICRO)
    return busy + own + _exchanges(writing, shape, device, together)


def _taking_turns(busy: Estimate, host: Estimate) -> Estimate:
    """The host runs ahead of the device, but waits for it once a token: side by side at best, one after the other at worst."""
    aside = longer(busy, host)
    return Estimate(value=aside.value, low=aside.low, high=busy.high + host.high)


def _going_through(cache: float, writing: Writing, device: Ceilings) -> Estimate:
    """An engine's kernels read a cache in order; growing one by `cat`, and repeating heads, can cost several times that."""
    known = moving(cache / writing.tensor_parallel, device, share="decode_memory_share")
    return known if writing.by_engine else Estimate(value=known.value, low=known.low, high=CARELESS * known.high)


def _cache_read(shape: Shape, layer: Layer, length: float, *, by_engine: bool) -> float:
    """Elements of one sequence's cache that one step goes through; `cat` writes them anew, and reads them for that."""
    seen = length if layer.window is None else min(length, layer.window)
    return seen * (layer.cached if by_engine else 3 * shape.unfolded)


def _weight_bytes(writing: Writing, shape: Shape, together: int | None = None) -> float:
    """Weights that one step reads on one rank: of experts, those that any of its tokens goes to."""
    size = dtype_bytes(writing.dtype)
    outside = (shape.head or shape.embedding) * size
    per_weight = quantised_bytes(writing.quantised_bits, quantisation(writing.config)) if writing.quantised_bits else size
    inside = sum(count * _read(layer, together) for layer, count in shape.kinds) * per_weight
    return (outside + inside) / writing.tensor_parallel


def _read(layer: Layer, together: int | None) -> float:
    if not layer.experts or together is None:
        return layer.parameters
    missed = (1 - layer.experts_used / layer.experts) ** together
    return layer.parameters - layer.experts * missed


def _exchanges(writing: Writing, shape: Shape, device: Ceilings, together: int) -> Estimate:
    if writing.tensor_parallel == 1:
        return Estimate.exactly(0)
    count = EXCHANGES_PER_LAYER * len(shape.layers)
    waits = each(count, efficiency("exchange_microseconds"), MICRO)
    payload = crossing(2.0 * count * together * shape.hidden * dtype_bytes(writing.dtype), device)
    return waits if payload is None else waits + payload
