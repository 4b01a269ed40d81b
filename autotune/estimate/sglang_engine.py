"""Memory of an SGLang engine by its own rules, and its error message.

    free  = memory of the device, or of the limit, when the engine starts, after its CUDA context
    cache = fraction · free - weights
    rest  = table of requests + workspace of the attention kernels + CUDA graphs + activations

(`profile_max_num_token` in sglang/srt/model_executor/model_runner_kv_cache_mixin.py.) Other
processes make the cache smaller. The radix cache keeps prefixes within the cache, at no further
memory. With `enable_memory_saver`, weights and cache are released between rollouts
(`release_memory_occupation`); graphs, workspace and the table stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from autotune.catalog import efficiency
from autotune.core.composition import EngineSettings
from autotune.core.prediction import EngineFit, Estimate
from autotune.core.units import GIB, MIB
from autotune.estimate import engine_memory, model_shape
from autotune.estimate.engine_cache import bytes_per_token
from autotune.estimate.engine_passes import (
    NOTHING,
    activation_bytes,
    graph_bytes,
    outside_torch_bytes,
)
from autotune.estimate.engine_use import EnginePlace, EngineUse, shared_bytes
from autotune.estimate.model_shape import Shape, dtype_bytes

TABLE_BYTES = 4  # per request and position: int32 (`ReqToTokenPool`)
EXTRA_POSITIONS = 4  # beyond the model's longest sequence
MANY_GPUS = 4  # from so many ranks on, larger batches have a CUDA graph


class _Defaults(NamedTuple):
    """Defaults by the size of the device (`ServerArgs.__post_init__`)."""

    prefill_tokens: int  # of one pass
    largest_graph: int  # largest batch with a CUDA graph
    largest_graph_on_many: int  # the same on many GPUs


SERVER_DEFAULTS = (
    (20, _Defaults(2048, 8, 8)),
    (35, _Defaults(2048, 24, 80)),
    (60, _Defaults(4096, 32, 160)),
    (90, _Defaults(8192, 256, 512)),
    (160, _Defaults(8192, 256, 512)),
)
"""Device memory below, in GiB -> defaults."""

DEFAULTS_OF_LARGEST = _Defaults(16384, 512, 512)


def fit(
    config: Mapping[str, object],
    settings: EngineSettings,
    place: EnginePlace,
    *,
    dtype: str,
) -> EngineUse:
    """Return the engine's memory, and its error message."""
    shape = model_shape.shape(config)
    size = dtype_bytes(dtype)
    ranks = settings.tensor_parallel
    # 1. The static part: weights and cache.
    weights = engine_memory.weight_bytes(
        shape,
        dtype=dtype,
        tensor_parallel=ranks,
        expert_parallel=settings.expert_parallel,
        quantised_bits=settings.quantised_bits,
    )
    outside = outside_torch_bytes(ranks, beside_trainer=False)
    shared = shared_bytes(place.device_memory_bytes, place.limit_bytes, place.gpu)
    free = Estimate.exactly(shared - place.other_bytes) - outside
    low, value, high = (
        cache_bytes(end, settings.utilization, weights) for end in (free.low, free.value, free.high)
    )

    # 2. The rest.
    defaults = _defaults(place)
    largest_graph = defaults.largest_graph
    if ranks >= MANY_GPUS:
        largest_graph = defaults.largest_graph_on_many
    sequences = min(largest_graph, settings.max_num_seqs)
    tokens = defaults.prefill_tokens
    graphs = NOTHING if settings.eager else graph_bytes(shape, size, ranks, sequences, tokens)
    workspace = efficiency("sglang_workspace_mib").scaled(MIB)
    table = request_table_bytes(shape, settings.max_num_seqs)
    activations = activation_bytes(shape, size, ranks, tokens, settings.max_num_seqs)

    # 3. Together.
    parts = {
        "weights": weights,
        "activations": round(activations.value),
        "kv_cache": max(0, round(value)),
        "cuda_graphs": round(graphs.value + workspace.value) + table,
        "outside_torch": round(outside.value),
    }
    standing = graphs + workspace + outside + Estimate.exactly(table)
    awake = _awake(sum(parts.values()), activations, standing)
    kv = None
    if value > 0:
        cache = Estimate(
            value=value,
            low=max(0.0, low),
            high=high,
        )
        kv = _cache_fit(shape, size, settings, cache)
    return EngineUse(
        reserved_bytes=awake,
        asleep_bytes=standing if settings.sleep else awake,
        weights_bytes=weights,
        kv=kv,
        failure=_refusal(settings) if kv is None else None,
        sure=(low > 0) == (high > 0),
        parts=parts,
    )


def _defaults(place: EnginePlace) -> _Defaults:
    """Return the defaults, which SGLang chooses by the whole device."""
    device_bytes = shared_bytes(place.device_memory_bytes, None, place.gpu)
    for below_gib, defaults in SERVER_DEFAULTS:
        if device_bytes < below_gib * GIB:
            return defaults
    return DEFAULTS_OF_LARGEST


def _awake(
    used: int,
    activations: Estimate,
    standing: Estimate,
) -> Estimate:
    """Return what it holds while it generates: activations need not reach their peak."""
    above = (standing.high - standing.value) + (activations.high - activations.value)
    least = used - activations.value - (standing.value - standing.low)
    return Estimate(
        value=used,
        low=max(0.0, least),
        high=used + above,
    )


def _cache_fit(
    shape: Shape,
    size: int,
    settings: EngineSettings,
    cache: Estimate,
) -> EngineFit:
    per_token = cache_bytes_per_token(shape, size, settings.tensor_parallel)
    tokens = int(cache.value // per_token)
    return EngineFit(
        kv_cache_bytes=cache,
        kv_cache_tokens=tokens,
        concurrency=cache.value / per_token / settings.max_model_length,
        longest_length=min(shape.positions, tokens),
    )


def _refusal(settings: EngineSettings) -> str:
    return (
        "Not enough memory. Please try to increase --mem-fraction-static. Current value:"
        f" self.server_args.mem_fraction_static={settings.utilization}"
    )


def cache_bytes(
    free: float,
    fraction: float,
    weights: float,
) -> float:
    """Return the cache's size; `free` is the free memory before the weights are loaded."""
    return fraction * free - weights


def request_table_bytes(shape: Shape, requests: int) -> int:
    """Bytes of the table of requests, which has the positions of the model's longest sequence."""
    return requests * (shape.positions + EXTRA_POSITIONS) * TABLE_BYTES


def cache_bytes_per_token(
    shape: Shape,
    size: int,
    ranks: int,
) -> int:
    """Bytes of one token in the cache of one rank."""
    return sum(bytes_per_token(layer, size, ranks) for layer in shape.layers if layer.cached)
