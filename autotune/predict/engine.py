"""Engine: what a vLLM engine takes from a GPU, by its own rules, and what it would say where that is not enough.

It claims a share of the device up front, loads its part of the weights, runs one forward pass at the largest batch it allows
itself, and gives everything that is left of its share to the cache.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from autotune.catalogue import Gpu
from autotune.catalogue.constants import constant
from autotune.catalogue.efficiency import efficiency
from autotune.predict import shapes
from autotune.predict.paging import Pages, gib, pages
from autotune.predict.shapes import Layer, Shape, dtype_bytes
from autotune.prediction import EngineFit, Estimate
from autotune.units import KIB, MIB

TRL_BATCHED_TOKENS = 4096
"""What TRL sets where the engine shares its processes."""

FILTERS_IN_PLACE, GRAPHS_IN_SHARE, SECOND_RUNNER, CURRENT = (0, 17), (0, 21), (0, 31), (0, 31)
"""The releases since which this holds, and the one that is taken for granted."""

KEPT = 256
"""Answers of what follows from a shape and a few settings alone: thousands of candidates share a handful."""

VOCABULARY_MULTIPLE = 64
"""vLLM pads the vocabulary to it."""


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """One engine on one rank."""

    reserved_bytes: Estimate
    """While awake: everything that is its, inside torch and outside."""

    asleep_bytes: Estimate
    """What it keeps while it sleeps; as much as awake where it cannot sleep."""

    weights_bytes: int
    """This rank's part, with the rotary tables."""

    kv: EngineFit | None
    """What is left for the cache; None where nothing is."""

    failure: str | None
    """What it raises at start, in its own words; None where it starts."""

    sure: bool
    """Whether it would start, or refuse, at both ends of what may be left for its cache."""

    parts: Mapping[str, int]
    """weights, activations, kv_cache, cuda_graphs, outside_torch: sums to what it takes while awake."""


def fit(
    config: Mapping[str, object],
    *,
    dtype: str,
    gpu: Gpu | None,
    device_memory_bytes: int,
    utilization: float,
    max_model_length: int,
    max_num_seqs: int,
    tensor_parallel: int,
    sleep: bool,
    eager: bool,
    other_bytes: int,
    quantised_bits: int | None,
    max_num_batched_tokens: int = TRL_BATCHED_TOKENS,
    vllm: str | None = None,
    on_cpu: bool = False,
) -> EngineUse:
    """What the engine takes and finds. `other_bytes` is what the device holds already when it is made.

    `vllm` is its version, None for a current one: releases differ in how they sample, and until 0.20 captured graphs came on
    top of the share. On a CPU there are no graphs, no driver and no context.
    """
    shape, size = shapes.shape(config), dtype_bytes(dtype)
    total = device_memory_bytes if on_cpu else offered_bytes(device_memory_bytes, gpu)
    claimed = math.ceil(total * utilization)
    weights = weight_bytes(
        shape, dtype=dtype, tensor_parallel=tensor_parallel, quantised_bits=quantised_bits, method=quantisation(config)
    )
    graphs_in_share = release(vllm) >= GRAPHS_IN_SHARE
    activations = activation_bytes(shape, size, tensor_parallel, max_num_batched_tokens, max_num_seqs, vllm=vllm)
    graphs = _nothing() if eager or on_cpu else graph_bytes(shape, size, tensor_parallel, max_num_seqs, max_num_batched_tokens)
    outside = _nothing() if on_cpu else outside_torch_bytes(tensor_parallel)
    rest = _less(claimed - weights, activations, outside, graphs if graphs_in_share else _nothing())
    paged = pages(shape, element_bytes=size, tensor_parallel=tensor_parallel, max_num_batched_tokens=max_num_batched_tokens)
    early = _refused_at_start(total, other_bytes, claimed, utilization) or _refused_weights(total - other_bytes, weights)
    failure = early or paged.refusal(int(rest.value), max_model_length)
    parts = _parts(claimed, weights, activations, rest, graphs, outside, graphs_in_share=graphs_in_share)
    awake = _awake(parts, activations, graphs, graphs_in_share=graphs_in_share)
    return EngineUse(
        reserved_bytes=awake,
        asleep_bytes=graphs + outside if sleep else awake,
        weights_bytes=weights,
        kv=None
        if rest.value <= 0
        else EngineFit(
            kv_cache_bytes=_at_least_nothing(rest),
            kv_cache_tokens=paged.tokens(int(rest.value), max_model_length),
            concurrency=paged.concurrency(int(rest.value), max_model_length),
            longest_length=paged.longest(int(rest.value), shape.positions),
        ),
        failure=failure,
        sure=early is not None or _same_at_both_ends(paged, rest, max_model_length),
        parts=parts,
    )


@lru_cache(KEPT)
def weight_bytes(
    shape: Shape, *, dtype: str, tensor_parallel: int, quantised_bits: int | None = None, method: str | None = None
) -> int:
    """This rank's weights as vLLM lays them out, with its rotary tables."""
    size = dtype_bytes(dtype)
    vocabulary = -(-shape.vocabulary // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    table = vocabulary * shape.hidden // tensor_parallel
    outside = table * (2 if shape.head else 1) + shape.final_norm + shape.towers + shape.rotary_rows * shape.rotary_dim
    per_weight = size if quantised_bits is None else quantised_bytes(quantised_bits, method)
    layers = sum(_layer_bytes(layer, size, tensor_parallel, per_weight) for layer in shape.layers)
    return outside * size + layers


def _layer_bytes(layer: Layer, size: int, ranks: int, per_weight: float) -> int:
    heads = max(1, layer.cache_heads // ranks) / layer.cache_heads
    here = layer.split / ranks + layer.key_value * heads + layer.copied
    matrices = here * layer.matrices / layer.parameters
    return round(matrices * per_weight + (here - matrices) * size)


def quantised_bytes(bits: int, method: str | None = None) -> float:
    """Bytes per weight with its scales: AWQ and GPTQ keep a half-precision scale and a zero point per 128 weights,
    bitsandbytes one float32 per 64 once it is loaded, and 8 bits one scale per output channel."""
    if bits != 4:
        return bits / 8
    return bits / 8 + ((2 + 0.5) / 128 if method in ("awq", "gptq") else 4 / 64)


def quantisation(config: Mapping[str, object]) -> str | None:
    """The method that a quantised model's own config names."""
    stated = config.get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    return method if isinstance(method, str) else None


@lru_cache(KEPT)
def activation_bytes(shape: Shape, size: int, ranks: int, tokens: int, sequences: int, *, vllm: str | None = None) -> Estimate:
    """The peak of the profiling run: a forward pass over `tokens`, or the sampler over the last token of each sequence."""
    per_logit = efficiency(_sampling(vllm))
    kept = tokens * shape.hidden * size
    logits = min(sequences, tokens) * shape.vocabulary
    forward = max(_layer_activation(shape, layer, size, ranks, tokens) for layer in set(shape.layers))
    return Estimate(
        value=max(forward, kept + logits * per_logit.value),
        low=max(0.8 * forward, kept + logits * per_logit.low),
        high=max(forward + kept, kept + logits * per_logit.high),
    )


def release(version: str | None) -> tuple[int, int]:
    """Major and minor of a version; of none, and of one that cannot be read, a current one's."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else CURRENT


def _sampling(vllm: str | None) -> str:
    if release(vllm) >= SECOND_RUNNER:
        return "engine_bytes_per_logit"
    return "engine_bytes_per_logit_filtering" if release(vllm) >= FILTERS_IN_PLACE else "engine_bytes_per_logit_sorting"


def _layer_activation(shape: Shape, layer: Layer, size: int, ranks: int, tokens: int) -> float:
    """Residual and input of a layer, and the widest moment inside: the MLP's two halves and their product, or the experts'."""
    stream = 2 * shape.hidden
    dense = 3 * layer.width / ranks
    width = layer.expert_width / ranks
    experts = layer.experts_per_token * (max(width, shape.hidden) + max(2 * width, shape.hidden)) if width else 0.0
    attention = 2 * (shape.heads + 2 * shape.key_value_heads) * shape.head_dim / ranks
    return tokens * size * (stream + max(dense + experts + (shape.hidden if width else 0), attention))


@lru_cache(KEPT)
def graph_bytes(shape: Shape, size: int, ranks: int, sequences: int, tokens: int) -> Estimate:
    """Captured CUDA graphs: the largest size's own activations, shared by all, and nodes for each size and layer."""
    sizes = captured_sizes(sequences, tokens)
    if not sizes:
        return _nothing()
    pool = max(_layer_activation(shape, layer, size, ranks, sizes[-1]) for layer in set(shape.layers))
    full = [captured for captured in sizes if captured <= sequences]
    pieces = (len(sizes) + len(full)) * len(shape.layers) * KIB
    known = efficiency("engine_graph_piece_kib")
    return Estimate(value=pool + pieces * known.value, low=pieces * known.low, high=2 * pool + pieces * known.high)


def captured_sizes(sequences: int, tokens: int, *, ceiling: int = 512) -> list[int]:
    """The batch sizes for which vLLM captures graphs by default."""
    largest = min(2 * sequences, ceiling, tokens)
    sizes = [size for size in (1, 2, 4) if size <= largest]
    return sizes + list(range(8, min(largest + 1, 256), 8)) + list(range(256, largest + 1, 16))


@lru_cache(KEPT)
def outside_torch_bytes(tensor_parallel: int) -> Estimate:
    """What the engine takes outside torch beyond what the process has already."""
    alone = constant("vllm_non_torch_mib")
    known = Estimate(value=alone.value, low=alone.low, high=alone.high)
    if tensor_parallel > 1:
        peers = efficiency("engine_non_torch_per_peer_mib")
        known = known + Estimate(value=peers.value, low=peers.low, high=peers.high)
    return known.scaled(MIB)


def sync_transient_bytes(config: Mapping[str, object], *, dtype: str, tensor_parallel: int = 1) -> int:
    """What pushing the weights one parameter at a time holds beside both copies: the largest fused parameter on its way.

    Merged adapters are merged in place, and a parameter goes over as it is; where it must be cut to a rank's part or fused
    with its neighbours, the slice is a copy.
    """
    shape = shapes.shape(config)
    largest = max([shape.embedding, *(layer.width * shape.hidden for layer in shape.layers)])
    return largest // tensor_parallel * dtype_bytes(dtype) if tensor_parallel > 1 else 0


def offered_bytes(device_memory_bytes: int, gpu: Gpu | None) -> int:
    """What CUDA offers of what nvidia-smi shows."""
    if gpu is not None and gpu.seen_by == "torch":
        return device_memory_bytes
    return device_memory_bytes - round(efficiency("driver_reserve_mib").value * MIB)


def _refused_at_start(total: int, other: int, claimed: int, utilization: float) -> str | None:
    free = total - other
    if free >= claimed:
        return None
    return (
        f"Free memory on device cuda:0 ({gib(free)}/{gib(total)} GiB) on startup is less than desired GPU memory utilization "
        f"({utilization}, {gib(claimed)} GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes."
    )


def _refused_weights(free: int, weights: int) -> str | None:
    if weights <= free:
        return None
    return f"CUDA out of memory while loading {gib(weights)} GiB of weights into {gib(free)} GiB of free memory."


def _same_at_both_ends(paged: Pages, rest: Estimate, length: int) -> bool:
    return (paged.refusal(int(rest.low), length) is None) == (paged.refusal(int(rest.high), length) is None)


def _parts(
    claimed: int,
    weights: int,
    activations: Estimate,
    rest: Estimate,
    graphs: Estimate,
    outside: Estimate,
    *,
    graphs_in_share: bool,
) -> dict[str, int]:
    cache = max(0, round(rest.value))
    parts = {"weights": weights, "activations": round(activations.value), "kv_cache": cache}
    parts |= {"cuda_graphs": round(graphs.value), "outside_torch": round(outside.value)}
    if cache and graphs_in_share:
        parts["kv_cache"] = claimed - sum(parts.values()) + cache  # so that the parts sum to the share to the byte
    return parts


def _awake(parts: Mapping[str, int], activations: Estimate, graphs: Estimate, *, graphs_in_share: bool) -> Estimate:
    """The share that it claims. Its activations need not come to their peak; what profiling overlooks comes on top."""
    total = sum(parts.values())
    beyond = 0.0 if graphs_in_share else graphs.high - graphs.value
    slack = efficiency("engine_slack_mib").high * MIB
    return Estimate(value=total, low=max(0.0, total - activations.value), high=total + slack + beyond)


def _less(whole: float, *takers: Estimate) -> Estimate:
    return Estimate(
        value=whole - sum(taker.value for taker in takers),
        low=whole - sum(taker.high for taker in takers),
        high=whole - sum(taker.low for taker in takers),
    )


def _at_least_nothing(found: Estimate) -> Estimate:
    return Estimate(value=found.value, low=max(0.0, found.low), high=found.high)


def _nothing() -> Estimate:
    return Estimate.exactly(0)
