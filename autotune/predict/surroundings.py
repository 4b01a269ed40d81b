"""What stands around the traced step for one candidate: library workspaces, its way of writing completions, the weight sync."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.catalogue import Gpu
from autotune.composition import Composition
from autotune.predict import constants, engine, rollout, shapes
from autotune.predict.allocator import AllocatorSettings
from autotune.predict.around import Generation, Surroundings
from autotune.predict.sharding import Sharding, gather_for_generation_bytes
from autotune.trace import Inventory, Trace

LOADS_AT_ONCE_FROM = (4, 50)
"""transformers' first release that asks for all weights' memory in one piece before it loads them onto a device."""

MERGE_BYTES_PER_WEIGHT = 4 + 4 + 2
"""Of the largest adapted matrix: the adapters' product in float32, the same scaled, and the same in the weights' precision."""


def surroundings(
    composition: Composition,
    config: Mapping[str, object],
    *,
    gpu: Gpu | None,
    trace: Trace,
    settings: Mapping[str, object],
    allocator: AllocatorSettings,
    on_cpu: bool = False,
) -> Surroundings:
    every = settings.get("torch_empty_cache_steps")
    gathers = not composition.gathers_each_token
    return Surroundings(
        cublas_workspace_bytes=0 if on_cpu else constants.cublas_workspace(gpu),
        generation=_generation(composition, config, trace.inventory, gathers) if composition.generation == "trainer" else None,
        merge_bytes=_sync_bytes(composition, config, trace.inventory) if composition.generation in ("engine", "server") else 0,
        loads_at_once=not on_cpu and _loads_at_once(composition, trace),
        empties_before_rollout=composition.empties_cache or (composition.engine is not None and composition.engine.sleep),
        empty_cache_steps=every if isinstance(every, int) and every > 0 else None,
        settings=allocator,
    )


def _loads_at_once(composition: Composition, trace: Trace) -> bool:
    """Straight onto the device, which several ranks' models are not: they come by way of the host."""
    version = trace.versions.get("transformers", "")
    known = tuple(int(number) for number in version.split(".")[:2] if number.isdigit())
    return trace.basis == "traced" and composition.ranks == 1 and known >= LOADS_AT_ONCE_FROM


def _generation(composition: Composition, config: Mapping[str, object], inventory: Inventory, gathers: bool) -> Generation:
    """Every rank writes its part of the generation batch at once, unless it does so by and by."""
    dtype = composition["policy"].dtype
    batch = composition.writes_at_a_time or max(1, composition.generation_batch // composition.ranks)
    prompt, completion = composition.prompt_length, composition.completion_length
    parts = rollout.transformers_generation(config, dtype=dtype, batch=batch, prompt=prompt, completion=completion)
    shape = shapes.shape(config)
    whole = rollout.cache_bytes(shape, shapes.dtype_bytes(dtype), batch, prompt + completion - 1)
    at_prefill = parts["kv_cache"] < whole
    return Generation(
        kv_cache_bytes=whole,
        logits_bytes=parts["logits"],
        prefill_bytes=parts["activations"] if at_prefill else 0,
        decode_bytes=0 if at_prefill else parts["activations"],
        layers=len(shape.layers),
        prompt_length=prompt,
        completion_length=completion,
        gathered_bytes=_gathered(composition, inventory, whole=gathers and composition.sharded_by == "zero3"),
    )


def _gathered(composition: Composition, inventory: Inventory, *, whole: bool) -> int:
    """What other ranks hold of the weights and a pass needs here: all at once, or the layer that runs and the next."""
    sharding = Sharding.of({"kind": composition.sharded_by, "ranks": composition.ranks})
    per_parameter = inventory.weight_bytes / max(1, inventory.parameters)
    one = gather_for_generation_bytes(inventory, sharding, whole=whole, bytes_per_parameter=per_parameter)
    return one if whole or not one else max(one, 2 * max(inventory.layer_bytes, default=0))


def _sync_bytes(composition: Composition, config: Mapping[str, object], inventory: Inventory) -> int:
    """With adapters ZeRO-3's weights are gathered all at once to be merged, or in as many parts as the framework says; else one
    parameter after the other goes over. An adapter that goes over alone takes nothing worth counting."""
    if composition.pushes_adapter:
        return 0
    sharding = Sharding.of({"kind": composition.sharded_by, "ranks": composition.ranks})
    adapters = composition["policy"].adapter_rank is not None
    gathered = gather_for_generation_bytes(
        inventory,
        sharding,
        whole=adapters and composition.sharded_by == "zero3",
        bytes_per_parameter=inventory.weight_bytes / max(1, inventory.parameters),
    )
    gathered //= composition.pushes_in if adapters else 1
    return gathered + _merge_bytes(composition, config) + _cut_bytes(composition, config)


def _cut_bytes(composition: Composition, config: Mapping[str, object]) -> int:
    if composition.engine is None:
        return 0
    dtype = composition["policy"].dtype
    return engine.sync_transient_bytes(config, dtype=dtype, tensor_parallel=composition.engine.tensor_parallel)


def _merge_bytes(composition: Composition, config: Mapping[str, object]) -> int:
    """Adapters are merged into the weights before they are handed over, one module at a time."""
    if composition["policy"].adapter_rank is None:
        return 0
    shape = shapes.shape(config)
    widest = max(max(layer.width, layer.expert_width) for layer, _ in shape.kinds)
    return MERGE_BYTES_PER_WEIGHT * shape.hidden * max(widest, shape.heads * shape.head_dim)
