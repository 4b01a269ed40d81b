"""From what torch allocates to what the device shows, each an interval with the mechanism behind its ends.

- allocated: the trace against torch's own peak; a stand-in step is off by more.
- reserved: at least what is allocated; what the replay finds; at most what it finds after a step of shorter sequences.
- shown (NVML): the context with its kernels and NCCL's buffers on top, each with its own interval.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.catalogue import Gpu
from autotune.catalogue.efficiency import efficiency
from autotune.predict import constants
from autotune.predict.usage import PhaseUse
from autotune.prediction import Basis, Estimate
from autotune.units import MIB

STATE = frozenset({"weights", "adapters", "gradients", "optimizer", "kv_cache"})
"""Parts that follow from the model's shape: no stand-in step changes them."""

CROWDED = 0.9
"""Share of the device from which on torch starts to give its cache back and to try again, and any figure is less certain."""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """What the process takes outside torch's allocator."""

    context: Estimate
    communication: Estimate

    @property
    def total(self) -> Estimate:
        return self.context + self.communication


def outside(gpu: Gpu | None, ranks: int, *, communicators: int = 1) -> Outside:
    return Outside(context=constants.context(gpu), communication=constants.communication(gpu, ranks, communicators))


def error_bytes(use: PhaseUse, basis: Basis) -> Estimate:
    """How far the trace itself can be off in this phase, around 0."""
    share = constants.percent("trace_error_percent").scaled(use.requested_bytes)
    if basis == "traced":
        return share
    moving = sum(held for part, held in use.parts.items() if part not in STATE)
    return share + constants.percent("generic_error_percent").scaled(moving)


def beside(parts: Mapping[str, int], basis: Basis) -> Estimate:
    """What stands beside the step. A model's activations there are taken to be like the policy's, so they are as uncertain."""
    size, alike = sum(parts.values()), sum(held for part, held in parts.items() if part.endswith("_activations"))
    if basis == "traced":
        return Estimate.exactly(size)
    return Estimate.exactly(size) + constants.percent("generic_error_percent").scaled(alike)


def allocated(use: PhaseUse, basis: Basis, high_extra_bytes: int) -> Estimate:
    """torch's own peak of handed-out blocks in this phase."""
    error = error_bytes(use, basis)
    at = use.allocated_bytes
    return Estimate(value=at, low=max(0, at + error.low), high=at + error.high + high_extra_bytes)


def reserved(use: PhaseUse, basis: Basis, high_extra_bytes: int) -> Estimate:
    """torch's own peak of segments in this phase."""
    error = error_bytes(use, basis)
    return Estimate(
        value=use.reserved_bytes,
        low=max(0, min(use.reserved_bytes, use.allocated_bytes + error.low)),
        high=use.reserved_high_bytes + error.high + high_extra_bytes,
    )


def highest(estimates: list[Estimate]) -> Estimate:
    """The peak of several: each end is the highest of its kind."""
    return Estimate(
        value=max(one.value for one in estimates), low=max(one.low for one in estimates), high=max(one.high for one in estimates)
    )


def offered(device_memory_bytes: int, gpu: Gpu | None) -> Estimate:
    """What CUDA has to give of the memory that the driver shows."""
    if gpu is not None and gpu.seen_by == "torch":
        return Estimate.exactly(device_memory_bytes)
    kept = efficiency("driver_reserve_mib")
    return Estimate(
        value=device_memory_bytes - kept.value * MIB,
        low=device_memory_bytes - kept.high * MIB,
        high=device_memory_bytes - kept.low * MIB,
    )


def verdict(peak: Estimate, room: Estimate) -> bool | None:
    """Whether it fits: yes or no only where no end of either interval says otherwise."""
    if peak.high <= room.low:
        return True
    return False if peak.low > room.high else None
