"""Memory of a vLLM or SGLang engine on a GPU by the engine's own rules, and its error messages.

vLLM: share = utilization · device, or of the memory limit (`core/engine_share.py`)
      cache = share - weights - activations - outside torch - CUDA graphs (since 0.21)

Activations are the peak of a profiling run: one forward pass at the largest permitted batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from autotune.catalog import Gpu, constant, cublas_workspace, efficiency, offered
from autotune.core.composition import Composition, EngineSettings
from autotune.core.prediction import EngineFit, Estimate
from autotune.core.units import GIB, KIB, MIB
from autotune.estimate import engine_memory, model_shape
from autotune.estimate.allocator import segment_bytes
from autotune.estimate.engine_memory import (
    MAX_CACHED,
    LoadedBlocks,
    adapter_slot_bytes,
    bytes_per_token,
    gib,
    pages,
    quantisation,
    table_bytes,
    weight_bytes,
)
from autotune.estimate.layer_shape import Layer
from autotune.estimate.model_shape import Shape, dtype_bytes
from autotune.estimate.vision import profiled_encoder

TRL_BATCHED_TOKENS = 4096  # set by TRL for an engine in its own processes

# First releases with: filtering of logits in place, CUDA graphs inside the share, weights in blocks
# that are not split, the second model runner; and the release assumed if the version is unknown.
FILTERS_IN_PLACE, GRAPHS_IN_SHARE, LOADS_UNSPLIT, SECOND_RUNNER, CURRENT = (
    (0, 17),
    (0, 21),
    (0, 21),
    (0, 31),
    (0, 31),
)
TUNES_WHILE_COMPILING = (0, 26)
"""Release in which this was read. torch's `standalone_compile` times kernels on example inputs
of their sizes, inside the profiling run. A compiled graph that is found in vLLM's cache on disk
needs none.
"""

MAKES_HEAD_FIRST = frozenset({"llama", "gemma3", "gemma3_text"})
"""Model types whose class in vLLM makes an output projection and then ties it to the embedding."""

NOTHING = Estimate.exactly(0)


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """Engine on one rank."""

    reserved_bytes: Estimate  # awake, inside torch and outside
    asleep_bytes: Estimate  # offloaded; as much as awake if it cannot be
    weights_bytes: int  # this rank's part, with the rotary tables
    kv: EngineFit | None  # memory left for the cache; None: none
    failure: str | None  # vLLM's error message at start; None: it starts
    sure: bool  # start or failure is the same at both ends of the cache's interval
    parts: Mapping[
        str, int
    ]  # weights, activations, kv_cache, cuda_graphs, outside_torch, open_segments: sum to `reserved_bytes`


def fit(
    config: Mapping[str, object],
    settings: EngineSettings,
    *,
    dtype: str,
    gpu: Gpu | None,
    device_memory_bytes: int,
    other_bytes: int,
    limit_bytes: int | None = None,
    vllm: str | None = None,
    on_cpu: bool = False,
    adapter_rank: int = 0,
) -> EngineUse:
    """Return the engine's memory; of vLLM with an adapter's rank, with the slot into which it is
    loaded.

    `other_bytes`: memory of the device in use when the engine starts. `limit_bytes`: memory limit,
    of which the engine has its share; None: the whole device. `vllm`: its version; None: a current
    one. On a CPU there are no graphs, no driver and no CUDA context.
    """
    if settings.kind != "vllm":
        return _sglang(
            config,
            settings,
            dtype=dtype,
            gpu=gpu,
            device_memory_bytes=device_memory_bytes,
            limit_bytes=limit_bytes,
            other_bytes=other_bytes,
        )
    # 1. Components of the share.
    shape, size = model_shape.shape(config), dtype_bytes(dtype)
    ranks, sequences, length = (
        settings.tensor_parallel,
        settings.max_num_seqs,
        settings.max_model_length,
    )
    tokens = settings.max_num_batched_tokens or TRL_BATCHED_TOKENS
    total = shared_bytes(device_memory_bytes, limit_bytes, gpu, on_cpu=on_cpu)
    claimed = math.ceil(total * settings.utilization)
    method = quantisation(config)
    bits = settings.quantised_bits
    weights = weight_bytes(
        shape,
        dtype=dtype,
        tensor_parallel=ranks,
        expert_parallel=settings.expert_parallel,
        quantised_bits=bits,
        method=method,
    )
    weights += adapter_slot_bytes(shape, size, ranks, adapter_rank) if adapter_rank else 0
    quantises = (
        bits == 4
        and method is None
        and not on_cpu
        and not any(layer.experts for layer in shape.layers)
    )
    blocks = LoadedBlocks()
    if release(vllm) >= LOADS_UNSPLIT and quantises:
        blocks = engine_memory.quantised_in_blocks(
            shape, size, ranks, makes_head_first=_makes_head_first(shape)
        )
    elif release(vllm) >= LOADS_UNSPLIT and not on_cpu and bits is None and method is None:
        blocks = engine_memory.loaded_in_blocks(shape, size, ranks)
    weights += blocks.unsplit_bytes
    graphs_in_share = release(vllm) >= GRAPHS_IN_SHARE
    activations = activation_bytes(shape, size, ranks, tokens, sequences, vllm=vllm)
    encoded, tower = profiled_encoder(config, size, hidden=shape.hidden, tokens=tokens)
    activations = Estimate(  # of the encoder, or of the decoder beside the encoder's outputs
        value=max(activations.value + encoded, tower),
        low=activations.low,
        high=max(activations.high + encoded, encoded + tower),
    )
    graphs = (
        NOTHING if settings.eager or on_cpu else graph_bytes(shape, size, ranks, sequences, tokens)
    )
    if graphs.value and quantises:
        graphs += Estimate.exactly(engine_memory.dequantised_bytes(shape, size, ranks))
    outside = NOTHING if on_cpu else outside_torch_bytes(ranks)
    # 2. Cache: the rest.
    examples = 0
    if release(vllm) >= TUNES_WHILE_COMPILING and not (settings.eager or on_cpu):
        examples = table_bytes(shape, size, ranks) + 2 * tokens * shape.hidden * size
    # Sleep mode's allocator gives this back after loading, behind torch, which still counts it as
    # reserved.
    left = blocks.left_bytes or (table_bytes(shape, size, ranks) if _makes_head_first(shape) else 0)
    returned = left if settings.sleep else 0
    profiled = Estimate(
        value=max(activations.value, examples),
        low=activations.low,
        high=max(activations.high, examples),
    )
    taken = profiled + outside + (graphs if graphs_in_share else NOTHING)
    rest = Estimate.exactly(claimed + returned - weights) - taken
    paged = pages(shape, element_bytes=size, tensor_parallel=ranks, max_num_batched_tokens=tokens)
    tuning = round(profiled.value - activations.value)
    if (
        paged.refusal(int(rest.value), length) is not None
    ):  # at most a first start fails: later ones find the compiled graph
        rest, tuning = replace(rest, value=rest.value + tuning), 0
    cache = int(rest.value)
    kv = (
        None
        if rest.value <= 0
        else EngineFit(
            kv_cache_bytes=Estimate(value=rest.value, low=max(0.0, rest.low), high=rest.high),
            kv_cache_tokens=paged.tokens(cache, length),
            concurrency=paged.concurrency(cache, length),
            longest_length=paged.longest(cache, shape.positions),
        )
    )
    # 3. By part.
    held = max(0, round(rest.value))
    parts = {"weights": weights, "activations": round(activations.value), "kv_cache": held}
    parts |= {"cuda_graphs": round(graphs.value), "outside_torch": round(outside.value)}
    if held and graphs_in_share:  # the parts sum to the share's to the byte
        parts["kv_cache"] = claimed + returned - tuning - sum(parts.values()) + held
    if settings.sleep and blocks.open_bytes:  # its pool is on the device in whole segments
        parts["open_segments"] = blocks.open_bytes
    # 4. Together. The activations need not reach their peak; the profiling run misses up to `slack`.
    early = _refusal(total, other_bytes, claimed, settings.utilization, weights)
    used, beyond = sum(parts.values()), 0.0 if graphs_in_share else graphs.high - graphs.value
    slack = efficiency("engine_slack_mib").high * MIB
    # In torch's own pool, which sleep mode leaves: cuBLAS's workspaces of the two streams on which
    # graphs are captured and replayed, each in a segment of its own, and the buffer of input
    # embeddings.
    standing = 2 * segment_bytes(cublas_workspace(gpu))
    standing += inputs_bytes(settings, shape, size) if settings.apart else 0
    awake = Estimate(value=used, low=max(0.0, used - activations.value), high=used + slack + beyond)
    return EngineUse(
        reserved_bytes=awake,
        asleep_bytes=graphs + outside + Estimate.exactly(standing) if settings.sleep else awake,
        weights_bytes=weights,
        kv=kv,
        failure=early or paged.refusal(cache, length),
        sure=early is not None
        or len({paged.refusal(int(end), length) is None for end in (rest.low, rest.high)}) == 1,
        parts=parts,
    )


def shared_bytes(
    device_memory_bytes: int, limit_bytes: int | None, gpu: Gpu | None, *, on_cpu: bool = False
) -> int:
    """Return the memory of which an engine has a share: that of the device, or of a smaller limit,
    in which the driver keeps its part as well.
    """
    size = device_memory_bytes if limit_bytes is None else min(limit_bytes, device_memory_bytes)
    if on_cpu:
        return size
    usable = offered(device_memory_bytes, gpu).value
    if size < device_memory_bytes:
        usable = min(usable, offered(size, None).value)
    return max(0, round(usable))


def _refusal(total: int, other: int, claimed: int, utilization: float, weights: int) -> str | None:
    """Return the error before there is a cache."""
    free = total - other
    if free < claimed:
        return (
            f"Free memory on device cuda:0 ({gib(free)}/{gib(total)} GiB) on startup is less than"
            f" desired GPU memory utilization ({utilization}, {gib(claimed)} GiB). Decrease GPU"
            " memory utilization or reduce GPU memory used by other processes."
        )
    if weights > free:
        return (
            f"CUDA out of memory while loading {gib(weights)} GiB of weights into {gib(free)} GiB"
            " of free memory."
        )
    return None


@lru_cache(MAX_CACHED)
def activation_bytes(
    shape: Shape, size: int, ranks: int, tokens: int, sequences: int, *, vllm: str | None = None
) -> Estimate:
    """Profiling run: max(forward pass over `tokens`, sampler over one token per sequence)."""
    per_logit = efficiency("engine_bytes_per_logit_sorting")
    if release(vllm) >= FILTERS_IN_PLACE:
        per_logit = efficiency(
            "engine_bytes_per_logit" + ("" if release(vllm) >= SECOND_RUNNER else "_filtering")
        )
    kept = tokens * shape.hidden * size
    logits = min(sequences, tokens) * shape.vocabulary
    forward = max(
        _layer_activation(shape, layer, size, ranks, tokens) for layer in set(shape.layers)
    )
    return Estimate(
        value=max(forward, kept + logits * per_logit.value),
        low=max(0.8 * forward, kept + logits * per_logit.low),
        high=max(forward + kept, kept + logits * per_logit.high),
    )


def release(version: str | None) -> tuple[int, int]:
    """Return major and minor; those of a current release if unknown or unreadable."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else CURRENT


def _layer_activation(shape: Shape, layer: Layer, size: int, ranks: int, tokens: int) -> float:
    """tokens · size · (residual + input + max(MLP or experts, attention))"""
    stream = 2 * shape.hidden
    dense = 3 * layer.width / ranks
    width = layer.expert_width / ranks
    experts = (
        layer.experts_per_token * (max(width, shape.hidden) + max(2 * width, shape.hidden))
        if width
        else 0.0
    )
    attention = 2 * (shape.heads + 2 * shape.key_value_heads) * shape.head_dim / ranks
    return (
        tokens * size * (stream + max(dense + experts + (shape.hidden if width else 0), attention))
    )


def inputs_bytes(settings: EngineSettings, shape: Shape, size: int) -> int:
    """Bytes of the buffer of input embeddings, in torch's own pool, which sleep mode leaves."""
    return (settings.max_num_batched_tokens or TRL_BATCHED_TOKENS) * shape.hidden * size


def inputs_beside(composition: Composition, config: Mapping[str, object]) -> int | None:
    """Return `inputs_bytes` of an engine in the trainer's process, whose free blocks it finds;
    None for another one.
    """
    settings = composition.engine
    if settings is None or settings.kind != "vllm" or settings.apart:
        return None
    return inputs_bytes(
        settings, model_shape.shape(config), dtype_bytes(composition["engine"].dtype)
    )


@lru_cache(MAX_CACHED)
def graph_bytes(shape: Shape, size: int, ranks: int, sequences: int, tokens: int) -> Estimate:
    """CUDA graphs: activations of the largest batch + nodes per batch size and layer."""
    sizes = captured_sizes(sequences, tokens)
    if not sizes:
        return NOTHING
    pool = max(
        _layer_activation(shape, layer, size, ranks, sizes[-1]) for layer in set(shape.layers)
    )
    full = [captured for captured in sizes if captured <= sequences]
    pieces = (len(sizes) + len(full)) * len(shape.layers) * KIB
    known = efficiency("engine_graph_piece_kib")
    return Estimate(
        value=pool + pieces * known.value,
        low=pieces * known.low,
        high=2 * pool + pieces * known.high,
    )


def captured_sizes(sequences: int, tokens: int) -> list[int]:
    """Batch sizes for which vLLM captures graphs by default."""
    largest = min(2 * sequences, 512, tokens)
    sizes = [size for size in (1, 2, 4) if size <= largest]
    return sizes + list(range(8, min(largest + 1, 256), 8)) + list(range(256, largest + 1, 16))


@lru_cache(MAX_CACHED)
def outside_torch_bytes(tensor_parallel: int) -> Estimate:
    """Memory outside torch beyond that of the process itself."""
    known: Estimate = constant("vllm_non_torch_mib")
    if tensor_parallel > 1:
        known = known + efficiency("engine_non_torch_per_peer_mib")
    return known.scaled(MIB)


def _makes_head_first(shape: Shape) -> bool:
    return not shape.head and shape.kind in MAKES_HEAD_FIRST


# SGLang.

TABLE_BYTES = 4  # per request and position: int32 (`ReqToTokenPool`)
EXTRA_POSITIONS = 4  # beyond the model's longest sequence

# Device memory below, in GiB -> tokens of one prefill pass, and the largest batch with a CUDA graph
# on fewer than four GPUs and on more (`ServerArgs.__post_init__`).
SGLANG_DEFAULTS = (
    (20, 2048, 8, 8),
    (35, 2048, 24, 80),
    (60, 4096, 32, 160),
    (90, 8192, 256, 512),
    (160, 8192, 256, 512),
)
SGLANG_LARGEST = (16384, 512, 512)


def _sglang(
    config: Mapping[str, object],
    settings: EngineSettings,
    *,
    dtype: str,
    gpu: Gpu | None,
    device_memory_bytes: int,
    limit_bytes: int | None,
    other_bytes: int,
) -> EngineUse:
    """Return the memory of an SGLang engine, and its error message.

    cache = fraction · free - weights    (`profile_max_num_token` in sglang/srt/model_executor/model_runner_kv_cache_mixin.py)

    `free` is the memory of the device, or of the limit, when the engine starts, after its own CUDA
    context: other processes make the cache smaller. The table of requests, the workspace of the attention kernels,
    CUDA graphs and activations come out of the rest. The radix cache keeps prefixes within the
    cache, at no further memory. With `enable_memory_saver`, weights and cache are released between
    rollouts (`release_memory_occupation`); graphs, workspace and the table stay.
    """
    shape, size = model_shape.shape(config), dtype_bytes(dtype)
    ranks, length = settings.tensor_parallel, settings.max_model_length
    whole = shared_bytes(device_memory_bytes, None, gpu)  # it chooses its defaults by the device
    total = shared_bytes(device_memory_bytes, limit_bytes, gpu)
    chunk, few, many = next(
        (row[1:] for row in SGLANG_DEFAULTS if whole < row[0] * GIB), SGLANG_LARGEST
    )
    # 1. The static part: weights and cache.
    outside = outside_torch_bytes(ranks)
    weights = engine_memory.weight_bytes(
        shape,
        dtype=dtype,
        tensor_parallel=ranks,
        expert_parallel=settings.expert_parallel,
        quantised_bits=settings.quantised_bits,
    )
    free = Estimate.exactly(total - other_bytes) - outside
    low, value, high = (
        cache_bytes(end, settings.utilization, weights) for end in (free.low, free.value, free.high)
    )
    per_token = cache_bytes_per_token(shape, size, ranks)
    kv = (
        None
        if value <= 0
        else EngineFit(
            kv_cache_bytes=Estimate(value=value, low=max(0.0, low), high=high),
            kv_cache_tokens=int(value // per_token),
            concurrency=value / per_token / length,
            longest_length=min(shape.positions, int(value // per_token)),
        )
    )
    # 2. What the rest holds.
    sequences = min(few if ranks < 4 else many, settings.max_num_seqs)
    graphs = NOTHING if settings.eager else graph_bytes(shape, size, ranks, sequences, chunk)
    workspace = efficiency("sglang_workspace_mib").scaled(MIB)
    table = request_table_bytes(shape, settings.max_num_seqs)
    activations = activation_bytes(shape, size, ranks, chunk, settings.max_num_seqs)
    # 3. Together.
    cache = max(0, round(value))
    parts = {
        "weights": weights,
        "activations": round(activations.value),
        "kv_cache": cache,
        "cuda_graphs": round(graphs.value + workspace.value) + table,
        "outside_torch": round(outside.value),
    }
    failure = (
        None
        if value > 0
        else (
            "Not enough memory. Please try to increase --mem-fraction-static. "
            f"Current value: self.server_args.mem_fraction_static={settings.utilization}"
        )
    )
    standing = graphs + workspace + outside + Estimate.exactly(table)
    used = sum(parts.values())
    slack = (standing.high - standing.value) + (activations.high - activations.value)
    awake = Estimate(
        value=used,
        low=max(0.0, used - activations.value - (standing.value - standing.low)),
        high=used + slack,
    )
    return EngineUse(
        reserved_bytes=awake,
        asleep_bytes=standing if settings.sleep else awake,
        weights_bytes=weights,
        kv=kv,
        failure=failure,
        sure=(low > 0) == (high > 0),
        parts=parts,
    )


def cache_bytes(free: float, fraction: float, weights: float) -> float:
    """Return the cache's size; `free` is the free memory before the weights are loaded."""
    return fraction * free - weights


def request_table_bytes(shape: Shape, requests: int) -> int:
    """Bytes of the table of requests, which has the positions of the model's longest sequence."""
    return requests * (shape.positions + EXTRA_POSITIONS) * TABLE_BYTES


def cache_bytes_per_token(shape: Shape, size: int, ranks: int) -> int:
    """Bytes of one token in the cache of one rank."""
    return sum(bytes_per_token(layer, size, ranks) for layer in shape.layers if layer.cached)
