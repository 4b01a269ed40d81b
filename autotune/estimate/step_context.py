"""TraceContext of one candidate: library workspaces, its kind of generation, its weight sync."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.catalog import Gpu
from autotune.core.composition import Composition
from autotune.core.trace import Inventory, Trace
from autotune.estimate import constant_estimates, model_shape, transformers_generation, vllm_engine
from autotune.estimate.allocator import AllocatorSettings
from autotune.estimate.sharding import Sharding, gather_for_generation_bytes
from autotune.estimate.trace_context import Generation, TraceContext

LOADS_AT_ONCE_FROM = (4, 50)
"""First transformers release that requests all weights in one block before loading."""

MERGE_BYTES_PER_WEIGHT = 4 + 4 + 2
"""Per weight of the largest adapted matrix: B·A, the same scaled, in the weights' dtype."""


def step_context(
    composition: Composition,
    config: Mapping[str, object],
    *,
    gpu: Gpu | None,
    trace: Trace,
    settings: Mapping[str, object],
    allocator: AllocatorSettings,
    on_cpu: bool = False,
) -> TraceContext:
    every = settings.get("torch_empty_cache_steps")
    return TraceContext(
        cublas_workspace_bytes=0 if on_cpu else constant_estimates.cublas_workspace(gpu),
        generation=_generation(composition, config, trace.inventory) if composition.generation == "trainer" else None,
        merge_bytes=_sync_bytes(composition, config, trace.inventory) if composition.generation in ("engine", "server") else 0,
        loads_at_once=not on_cpu and _loads_at_once(composition, trace),
        empties_before_rollout=composition.empties_rollout_cache or (composition.engine is not None and composition.engine.sleep),
        empty_cache_steps=every if isinstance(every, int) and every > 0 else None,
        settings=allocator,
    )


def _loads_at_once(composition: Composition, trace: Trace) -> bool:
    """Return True if the model is loaded straight onto the device: on one rank."""
    version = trace.versions.get("transformers", "")
    known = tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
    return trace.basis == "traced" and composition.ranks == 1 and known >= LOADS_AT_ONCE_FROM


def _generation(composition: Composition, config: Mapping[str, object], inventory: Inventory) -> Generation:
    """Return one rank's rollout: its part of the batch, at once or in smaller batches."""
    dtype = composition["policy"].dtype
    batch = composition.generation_micro_batch or max(1, composition.generation_batch // composition.ranks)
    prompt, completion = composition.prompt_length, composition.completion_length
    parts = transformers_generation.transformers_generation(
        config, dtype=dtype, batch=batch, prompt=prompt, completion=completion
    )
    shape = model_shape.shape(config)
    whole = transformers_generation.cache_bytes(shape, model_shape.dtype_bytes(dtype), batch, prompt + completion - 1)
    at_prefill = parts["kv_cache"] < whole
    # Weights of other ranks: all at once, or the running layer and the next.
    at_once = not composition.gathers_per_token and composition.sharded_by == "zero3"
    gathered = _gathered_bytes(composition, inventory, whole=at_once)
    if gathered and not at_once:
        gathered = max(gathered, 2 * max(inventory.layer_bytes, default=0))
    return Generation(
        kv_cache_bytes=whole,
        logits_bytes=parts["logits"],
        prefill_bytes=parts["activations"] if at_prefill else 0,
        decode_bytes=0 if at_prefill else parts["activations"],
        layers=len(shape.layers),
        prompt_length=prompt,
        completion_length=completion,
        gathered_bytes=gathered,
    )


def _gathered_bytes(composition: Composition, inventory: Inventory, *, whole: bool) -> int:
    return gather_for_generation_bytes(
        inventory,
        Sharding.of({"kind": composition.sharded_by, "ranks": composition.ranks}),
        whole=whole,
        bytes_per_parameter=inventory.weight_bytes / max(1, inventory.parameters),
    )


def _sync_bytes(composition: Composition, config: Mapping[str, object], inventory: Inventory) -> int:
    """Return gathered weights + merged adapter + slice for a tensor-parallel rank.

    With adapters ZeRO-3 gathers all weights to merge them, in as many parts as the framework
    states; otherwise one parameter at a time. An adapter pushed alone is too small to count.
    """
    if composition.syncs_adapter_only:
        return 0
    adapters = composition["policy"].adapter_rank is not None
    gathered = _gathered_bytes(composition, inventory, whole=adapters and composition.sharded_by == "zero3")
    gathered //= composition.sync_parts if adapters else 1
    merged = sliced = 0
    if adapters:  # merged one module at a time, before the push
        shape = model_shape.shape(config)
        widest = max(max(layer.width, layer.expert_width) for layer, _ in shape.kinds)
        merged = MERGE_BYTES_PER_WEIGHT * shape.hidden * max(widest, shape.heads * shape.head_dim)
    if composition.engine is not None:
        dtype, tensor_parallel = composition["policy"].dtype, composition.engine.tensor_parallel
        sliced = vllm_engine.sync_bytes(config, dtype=dtype, tensor_parallel=tensor_parallel)
    return gathered + merged + sliced
