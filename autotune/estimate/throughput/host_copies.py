"""Copies between the memory of the device and of the host: state that is offloaded while others
use the device, and activations that wait on the host.

    seconds = bytes / rate

    state of the policy    tensor by tensor; nothing overlaps: the next phase needs the state
    optimizer's state      before and after its step
    activations            beside the passes: a share of the copies is exposed
    an engine's weights    when it falls asleep and when it wakes

All of it is pinned memory on the host: torch pins what `.to("cpu", non_blocking=True)` returns.

Example: 3.5 GB of weights that leave the device after the scoring, the update and the sync are
copied six times: 21 GB, 0.8 s at 0.4 of the 64 GB/s of PCIe 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.catalog import Gpu, efficiency
from autotune.core.composition import Composition
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate
from autotune.core.trace import Inventory
from autotune.estimate.model_shape import Shape
from autotune.estimate.throughput.generation import GB, over
from autotune.estimate.weight_sync import SHARDS_WEIGHTS

THERE_AND_BACK = 2
HALF_BYTES = 2
ADAM_MOMENTS = 2  # of Adam, in the precision of the trained weights
PCIE_GB_PER_SECOND = {7: 16.0, 8: 32.0}
NEWEST_PCIE_GB_PER_SECOND = 64.0  # generation 5, from compute capability 9 on


def host_link_gb_per_second(gpu: Gpu) -> float:
    """Return the rate of the link to the host in one direction, as the vendor states it."""
    if gpu.host_link_gb_per_second is not None:
        return gpu.host_link_gb_per_second
    major = int(float(gpu.compute_capability or 0))
    return PCIE_GB_PER_SECOND.get(major, NEWEST_PCIE_GB_PER_SECOND)


def with_host_copies(
    seconds: Mapping[Phase, Estimate],
    composition: Composition,
    inventory: Inventory,
    shape: Shape,
    gpu: Gpu,
    *,
    micro_steps: int,
    optimizer_steps: int,
) -> dict[Phase, Estimate]:
    """Return the phases with the copies that each of them waits for."""
    copies: dict[Phase, Estimate] = {}

    # 1. State that leaves the device after each phase that uses it.
    offloaded = composition.offloaded_in_rollout
    weights = _state_seconds(THERE_AND_BACK * _weight_bytes(composition, inventory), gpu)
    if "weights" in offloaded:
        scored = weights.scaled(composition.scorings)
        copies |= {"score": scored, "optimizer": weights, "sync": weights}
    if "optimizer" in offloaded:
        state = _state_seconds(THERE_AND_BACK * _optimizer_bytes(composition, inventory), gpu)
        copies["optimizer"] = copies.get("optimizer", Estimate.exactly(0)) + state
    if composition.offloads_optimizer:
        moved = THERE_AND_BACK * optimizer_steps * _optimizer_bytes(composition, inventory)
        copies["optimizer"] = pinned_seconds(moved, gpu)

    # 2. Inputs of recomputed layers.
    if composition.activations_in_flight is not None:
        tokens = composition.micro_batch * (
            composition.prompt_length + composition.completion_length
        )
        saved = micro_steps * tokens * shape.hidden * len(shape.layers) * HALF_BYTES
        exposed = _exposed(pinned_seconds(saved, gpu))
        copies |= {"forward": exposed, "backward": exposed}

    # 3. An engine that keeps its weights on the host while it sleeps.
    engine = composition.engine
    if engine is not None and engine.sleep and composition.syncs_adapter_only:
        moved = THERE_AND_BACK * inventory.weight_bytes / engine.tensor_parallel
        waking = pinned_seconds(moved, gpu)
        copies["sync"] = copies.get("sync", Estimate.exactly(0)) + waking

    with_copies = dict(seconds)
    for phase, spent in copies.items():
        if phase in with_copies:
            with_copies[phase] = with_copies[phase] + spent
    return with_copies


def pinned_seconds(count: float, gpu: Gpu) -> Estimate:
    return over(count / (host_link_gb_per_second(gpu) * GB), efficiency("host_link_share"))


def _state_seconds(count: float, gpu: Gpu) -> Estimate:
    return over(count / (host_link_gb_per_second(gpu) * GB), efficiency("state_copy_share"))


def _exposed(copies: Estimate) -> Estimate:
    share = efficiency("exposed_exchange_share")
    return Estimate(
        value=copies.value * share.value,
        low=copies.low * share.low,
        high=copies.high * share.high,
    )


def _weight_bytes(composition: Composition, inventory: Inventory) -> float:
    """Return the bytes of the weights on one rank."""
    if composition.sharded_by in SHARDS_WEIGHTS:
        return inventory.weight_bytes / composition.ranks
    return inventory.weight_bytes


def _optimizer_bytes(composition: Composition, inventory: Inventory) -> float:
    """Return the bytes of the optimizer's state on one rank."""
    moments = ADAM_MOMENTS * inventory.trainable_bytes
    if composition.sharded_by in ("none", "ddp"):
        return moments
    return moments / composition.ranks
