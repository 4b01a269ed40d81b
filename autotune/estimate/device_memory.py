"""Device memory (NVML) from torch's allocations; each figure an interval with a known cause.

- allocated = a ± e: trace against torch's own peak; e is larger for a stand-in step
- reserved: low: `allocated`; value: the replay; high: the replay after a shorter first step
- device memory = reserved + CUDA context with kernels + NCCL buffers, each with its own interval
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.catalog import Gpu
from autotune.core.prediction import Basis, Estimate
from autotune.estimate import constant_estimates
from autotune.estimate.replay import PhaseUse

STATE = frozenset({"weights", "adapters", "gradients", "optimizer", "kv_cache"})
"""Parts that the model's shape determines, also for a stand-in step."""

CROWDED = 0.9
"""Share of the device above which torch empties its cache and retries: figures are less certain."""


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Memory of the process outside torch's allocator."""

    context: Estimate
    communication: Estimate

    @property
    def total(self) -> Estimate:
        return self.context + self.communication


def outside(gpu: Gpu | None, ranks: int, *, communicators: int = 1) -> Outside:
    return Outside(
        context=constant_estimates.context(gpu), communication=constant_estimates.communication(gpu, ranks, communicators)
    )


def error_bytes(use: PhaseUse, basis: Basis) -> Estimate:
    """Error of the trace itself in this phase, around 0."""
    share = constant_estimates.percent("trace_error_percent").scaled(use.requested_bytes)
    if basis == "traced":
        return share
    sent = {"communication"} if use.phase == "sync" else set()  # whole weights and a buffer: counted, not a step's
    moving = sum(size for part, size in use.parts.items() if part not in STATE and part not in sent)
    return share + constant_estimates.percent("generic_error_percent").scaled(moving)


def other_models(parts: Mapping[str, int], basis: Basis) -> Estimate:
    """Bytes of models outside the step, with activations scaled from the policy's."""
    size, scaled = sum(parts.values()), sum(size for part, size in parts.items() if part.endswith("_activations"))
    if basis == "traced":
        return Estimate.exactly(size)
    return Estimate.exactly(size) + constant_estimates.percent("generic_error_percent").scaled(scaled)


def allocated(use: PhaseUse, basis: Basis, high_extra_bytes: int) -> Estimate:
    """Peak of torch's allocated bytes in this phase."""
    return around(use.allocated_bytes, error_bytes(use, basis), high_extra_bytes)


def around(size: int, error: Estimate, high_extra_bytes: int = 0) -> Estimate:
    """Return size + error, at least 0."""
    return Estimate(value=size, low=max(0, size + error.low), high=size + error.high + high_extra_bytes)


def reserved(use: PhaseUse, basis: Basis, high_extra_bytes: int) -> Estimate:
    """Peak of torch's reserved bytes in this phase."""
    error = error_bytes(use, basis)
    return Estimate(
        value=use.reserved_bytes,
        low=max(0, min(use.reserved_bytes, use.allocated_bytes + error.low)),
        high=use.reserved_high_bytes + error.high + high_extra_bytes,
    )


def whole_bytes(estimate: Estimate) -> Estimate:
    value = round(estimate.value)
    return Estimate(value=value, low=min(value, round(estimate.low)), high=max(value, round(estimate.high)))


def verdict(peak: Estimate, room: Estimate) -> bool | None:
    """Return True or False if the two intervals do not overlap, else None."""
    if peak.high <= room.low:
        return True
    return False if peak.low > room.high else None
