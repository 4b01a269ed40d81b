"""Memory of an SGLang engine on a GPU by SGLang's own rules, and its error message.

cache = fraction · free - weights          (`profile_max_num_token` in
                                            sglang/srt/model_executor/model_runner_kv_cache_mixin.py)

`free` is the memory of the device when the engine starts, after its own CUDA context: other processes
make the cache smaller. The table of requests, the workspace of the attention kernels, CUDA graphs and
activations come out of the rest. The radix cache keeps prefixes within the cache, at no further memory.
With `enable_memory_saver`, weights and cache are released between rollouts
(`release_memory_occupation`); graphs, workspace and the table stay.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.catalog import Gpu
from autotune.catalog.constants import efficiency
from autotune.core.composition import EngineSettings
from autotune.core.prediction import EngineFit, Estimate
from autotune.core.units import GIB, MIB
from autotune.estimate import model_shape, vllm_engine, vllm_weights
from autotune.estimate.constant_estimates import offered
from autotune.estimate.model_shape import Shape, dtype_bytes
from autotune.estimate.vllm_blocks import bytes_per_token
from autotune.estimate.vllm_engine import NOTHING, EngineUse

TABLE_BYTES = 4  # per request and position: int32 (`ReqToTokenPool`)
EXTRA_POSITIONS = 4  # beyond the model's longest sequence

# Device memory below, in GiB -> tokens of one prefill pass, and the largest batch with a CUDA graph on fewer
# than four GPUs and on more (`ServerArgs.__post_init__`).
DEFAULTS = ((20, 2048, 8, 8), (35, 2048, 24, 80), (60, 4096, 32, 160), (90, 8192, 256, 512), (160, 8192, 256, 512))
LARGEST = (16384, 512, 512)


def fit(
    config: Mapping[str, object],
    settings: EngineSettings,
    *,
    dtype: str,
    gpu: Gpu | None,
    device_memory_bytes: int,
    other_bytes: int,
) -> EngineUse:
    """Return the engine's memory. `other_bytes`: memory of the device in use when the engine starts."""
    shape, size = model_shape.shape(config), dtype_bytes(dtype)
    ranks, length = settings.tensor_parallel, settings.max_model_length
    total = round(offered(device_memory_bytes, gpu).value)
    chunk, few, many = next((row[1:] for row in DEFAULTS if total < row[0] * GIB), LARGEST)
    # 1. The static part: weights and cache.
    outside = vllm_engine.outside_torch_bytes(ranks)
    weights = vllm_weights.weight_bytes(
        shape, dtype=dtype, tensor_parallel=ranks, expert_parallel=settings.expert_parallel,
        quantised_bits=settings.quantised_bits,
    )  # fmt: skip
    free = Estimate.exactly(total - other_bytes) - outside
    low, value, high = (cache_bytes(end, settings.utilization, weights) for end in (free.low, free.value, free.high))
    per_token = cache_bytes_per_token(shape, size, ranks)
    kv = None if value <= 0 else EngineFit(
        kv_cache_bytes=Estimate(value=value, low=max(0.0, low), high=high),
        kv_cache_tokens=int(value // per_token),
        concurrency=value / per_token / length,
        longest_length=min(shape.positions, int(value // per_token)),
    )  # fmt: skip
    # 2. What the rest holds.
    sequences = min(few if ranks < 4 else many, settings.max_num_seqs)
    graphs = NOTHING if settings.eager else vllm_engine.graph_bytes(shape, size, ranks, sequences, chunk)
    workspace = efficiency("sglang_workspace_mib").scaled(MIB)
    table = table_bytes(shape, settings.max_num_seqs)
    activations = vllm_engine.activation_bytes(shape, size, ranks, chunk, settings.max_num_seqs)
    # 3. Together.
    cache = max(0, round(value))
    parts = {
        "weights": weights,
        "activations": round(activations.value),
        "kv_cache": cache,
        "cuda_graphs": round(graphs.value + workspace.value) + table,
        "outside_torch": round(outside.value),
    }
    failure = None if value > 0 else (
        "Not enough memory. Please try to increase --mem-fraction-static. "
        f"Current value: self.server_args.mem_fraction_static={settings.utilization}"
    )  # fmt: skip
    standing = graphs + workspace + outside + Estimate.exactly(table)
    used = sum(parts.values())
    slack = (standing.high - standing.value) + (activations.high - activations.value)
    awake = Estimate(value=used, low=max(0.0, used - activations.value - (standing.value - standing.low)), high=used + slack)
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


def table_bytes(shape: Shape, requests: int) -> int:
    """Bytes of the table of requests, which has the positions of the model's longest sequence."""
    return requests * (shape.positions + EXTRA_POSITIONS) * TABLE_BYTES


def cache_bytes_per_token(shape: Shape, size: int, ranks: int) -> int:
    """Bytes of one token in the cache of one rank."""
    return sum(bytes_per_token(layer, size, ranks) for layer in shape.layers if layer.cached)
