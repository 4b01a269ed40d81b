"""Memory that a weight sync holds on a training rank: gathered weights, merged adapters, buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from autotune.core.composition import Composition
from autotune.core.trace import Inventory, Part, Trace
from autotune.core.units import format_bytes
from autotune.estimate import model_shape
from autotune.estimate.trainer_rollout import gathered_bytes, gathered_pieces
from autotune.worker.releases import release_numbers

SYNC_STREAM = 64  # streams of the weight sync are numbered from here on, apart from those of the sharding
MERGE_BYTES_PER_WEIGHT = 4 + 4 + 2  # per weight of the largest adapted matrix: B·A, the same scaled, in the weights' dtype


TRL_PACKS_FROM = (1, 11)
"""First release of TRL that sends packed buffers to its server; earlier ones send one parameter at a time."""


def packs(composition: Composition, versions: Mapping[str, str]) -> bool:
    """Return True if weights are sent in packed buffers, two of which are held at a time."""
    return composition.sync_gathers == "packed" and release_numbers(versions.get("trl") or "") >= TRL_PACKS_FROM


def sync_blocks(composition: Composition, config: Mapping[str, object], trace: Trace) -> Iterator[tuple[Part, int]]:
    """Yield gathered weights, the merged adapter.

    With adapters ZeRO-3 gathers all weights to merge them, in as many parts as the framework
    states; otherwise one parameter at a time. An adapter pushed alone is too small to count, unless
    its framework gathers the base weights for it as well.
    """
    if composition.generation not in ("engine", "server"):
        return
    adapters = composition["policy"].adapter_rank is not None
    whole = adapters and composition.sharded_by == "zero3"
    packed = packs(composition, trace.versions)
    if packed:
        yield from (("communication", size) for size in packed_blocks(composition, trace))
    elif composition.sync_gathers not in (None, "packed"):
        yield "communication", _sent_bytes(composition, config, trace.inventory)
        return
    if composition.syncs_adapter_only and not composition.first_sync_is_whole:
        return
    size = gathered_bytes(composition, trace.inventory, whole=whole)
    if whole:
        yield from (("communication", one // composition.sync_parts) for one in gathered_pieces(size, trace))
    elif not packed:
        yield "communication", size
    if adapters and not packed:  # merged one module at a time; a buffer, made afterwards, is larger
        largest = _largest_adapted(composition, trace)
        if not largest:
            shape = model_shape.shape(config)
            widest = max(max(layer.width, layer.expert_width) for layer, _ in shape.kinds)
            largest = shape.hidden * max(widest, shape.heads * shape.head_dim)
        yield "workspaces", MERGE_BYTES_PER_WEIGHT * largest


def _largest_adapted(composition: Composition, trace: Trace) -> int:
    """Return the elements of the largest adapted matrix, from the sizes of A and B; 0 if they are not whole in the trace."""
    rank, held = composition["policy"].adapter_rank, trace.inventory
    loaded = next((mark.event for mark in trace.marks if mark.phase != "load"), 0)
    numbers = (entry - 1 for entry in trace.events[:loaded] if entry > 0)
    sizes = [trace.sizes[number] for number in numbers if trace.part_names[trace.parts[number]] == "adapters"]
    if not rank or len(sizes) % 2 or sum(sizes) != held.trainable_bytes:
        return 0
    width = held.trainable_bytes // max(1, held.trainable_parameters)
    return max((a * b // (rank * width) ** 2 for a, b in zip(sizes[::2], sizes[1::2], strict=True)), default=0)


def receiving_failure(composition: Composition, trace: Trace, room_bytes: float) -> str | None:
    """Return the error of a server that has no room for the two buffers beside its engine's share."""
    if not packs(composition, trace.versions):
        return None
    buffers = sum(packed_blocks(composition, trace)[:2])
    if buffers <= room_bytes:
        return None
    return f"CUDA out of memory on the server's GPU: it receives weights in {format_bytes(buffers)} beside its engine's share."


def _sent_bytes(composition: Composition, config: Mapping[str, object], inventory: Inventory) -> int:
    """Return what a rank holds at most while it sends weights in the precision of its shards.

    The buffer is made after the copies. A layer or a model is gathered before it, and no longer there.
    """
    width, buffer = model_shape.dtype_bytes(composition["policy"].dtype), composition.sync_buffer_bytes
    per_byte = inventory.parameters / max(1, inventory.weight_bytes)
    shape, apart = model_shape.shape(config), composition.ranks > 1
    layer = max(inventory.layer_bytes, default=0)
    root = inventory.weight_bytes - sum(inventory.layer_bytes)
    if composition.sync_gathers == "model":
        return max(buffer, inventory.parameters * width * apart)
    if composition.sync_gathers == "layer":
        return max(buffer, round(max(layer, root) * per_byte) * width * apart)
    largest = inventory.largest_parameter * width * apart
    if composition.sync_gathers == "parameter":
        return largest + buffer
    # A state dict names a tied head again. A unit's whole parameters and a copy of the largest are there before the buffer.
    named = inventory.parameters + (0 if shape.head else shape.embedding)
    return named * width // composition.ranks + largest + max(buffer, round(max(layer, root) * per_byte) * width * apart)


def packed_blocks(composition: Composition, trace: Trace) -> tuple[int, ...]:
    """Return two packed buffers in the trained precision, and what is gathered for the larger one, unless
    adapters are merged into weights that are all gathered.

    `packed_nccl_broadcast_producer` of vLLM collects parameters until they exceed the buffer's size, and
    concatenates them while the buffer before is sent. Sharded ones are gathered first. Each buffer is on a
    stream of its own, made anew for each sync: no later sync finds the blocks of an earlier one.
    """
    policy, inventory = composition["policy"], trace.inventory
    # 1. The parameters' sizes as they are sent: embedding, layers, and last a head of its own.
    scale = inventory.parameters * model_shape.dtype_bytes(policy.dtype) / max(1, inventory.weight_bytes)
    pieces = [round(one * scale) for one in gathered_pieces(inventory.weight_bytes, trace)]
    head = 1 if trace.usage is None and len(pieces) > 1 and pieces[0] == pieces[1] == max(pieces) else 0
    # 2. Buffers.
    buffers: list[int] = [0]
    for size in (*pieces[head:], *pieces[:head]):
        if buffers[-1] > composition.sync_buffer_bytes:
            buffers.append(0)
        buffers[-1] += size
    gathered = max(buffers) if policy.sharding == "parameters" and policy.adapter_rank is None else 0
    return max(buffers[::2]), max(buffers[1::2], default=0), gathered
