"""A rollout engine on a device: where it starts, and what it takes there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.catalog import Gpu, offered
from autotune.core.prediction import EngineFit, Estimate


@dataclass(frozen=True, kw_only=True)
class EngineUse:
    """Engine on one rank."""

    reserved_bytes: Estimate  # awake, inside torch and outside
    asleep_bytes: Estimate  # offloaded; as much as awake if it cannot be
    weights_bytes: int  # this rank's part, with the rotary tables
    kv: EngineFit | None  # memory left for the cache; None: none
    failure: str | None  # the engine's error message at start; None: it starts
    sure: bool  # start or failure is the same at both ends of the cache's interval
    # weights, activations, kv_cache, cuda_graphs, outside_torch, open_segments: they sum to
    # `reserved_bytes`
    parts: Mapping[str, int]
    # Of it in torch's pool for as long as it lives: graphs and cuBLAS's workspaces.
    standing_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class EnginePlace:
    """Device on which an engine starts."""

    gpu: Gpu | None
    device_memory_bytes: int
    limit_bytes: int | None = None  # memory limit; None: the whole device
    other_bytes: int = 0  # memory in use when the engine starts
    on_cpu: bool = False  # then there are no graphs, no driver and no CUDA context

    @property
    def shared_bytes(self) -> int:
        """Memory of which the engine has a share."""
        return shared_bytes(
            self.device_memory_bytes, self.limit_bytes, self.gpu, on_cpu=self.on_cpu
        )


def shared_bytes(
    device_memory_bytes: int,
    limit_bytes: int | None,
    gpu: Gpu | None,
    *,
    on_cpu: bool = False,
) -> int:
    """Return the memory of which an engine has a share: that of the device, or of a smaller limit,
    in which the driver keeps its part as well (`core/engine_share.py`).
    """
    size = device_memory_bytes if limit_bytes is None else min(limit_bytes, device_memory_bytes)
    if on_cpu:
        return size
    usable = offered(device_memory_bytes, gpu).value
    if size < device_memory_bytes:
        usable = min(usable, offered(size, None).value)
    return max(0, round(usable))
