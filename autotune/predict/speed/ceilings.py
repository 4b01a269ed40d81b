"""Ceilings: what a device could do at most, and the share of it that real work reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.catalogue import Gpu
from autotune.catalogue.constants import Constant
from autotune.catalogue.efficiency import efficiency
from autotune.prediction import Estimate

GB = 10**9
TERA = 10**12
WITHOUT_TENSOR_CORES = 2
"""A half precision that the tensor cores don't take runs as float32, and is converted back and forth."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """One device."""

    flops: Mapping[str, float]
    """Per second, by dtype."""

    bytes_per_second: float
    link_bytes_per_second: float | None = None
    link: str | None = None
    half_is_emulated: frozenset[str] = field(default_factory=frozenset)
    """Precisions that run without tensor cores."""


def ceilings(gpu: Gpu) -> Ceilings | None:
    """Of a catalogued GPU; None where the catalogue does not know its speed."""
    if gpu.bandwidth_gb_per_second is None or "float32" not in gpu.tflops:
        return None
    flops = {dtype: figure * TERA for dtype, figure in gpu.tflops.items()}
    emulated = frozenset({"bfloat16", "float16"} - flops.keys())
    for dtype in emulated:
        flops[dtype] = flops["float32"]
    return Ceilings(
        flops=flops,
        bytes_per_second=gpu.bandwidth_gb_per_second * GB,
        link_bytes_per_second=None if gpu.link_gb_per_second is None else gpu.link_gb_per_second * GB,
        link=gpu.link,
        half_is_emulated=emulated,
    )


def computing(flops: Mapping[str, float], device: Ceilings) -> Estimate:
    """Seconds of matrix products and attention."""
    total = Estimate.exactly(0)
    for dtype, count in flops.items():
        peak = device.flops.get(dtype, device.flops["float32"])
        share = efficiency("matmul_share_float32" if peak == device.flops["float32"] else "matmul_share")
        slow = WITHOUT_TENSOR_CORES if dtype in device.half_is_emulated else 1
        known = over(count / peak, share)
        total = total + Estimate(value=known.value, low=known.low, high=known.high * slow)
    return total


def moving(count: float, device: Ceilings, *, share: str = "memory_share") -> Estimate:
    """Seconds of going through memory."""
    return over(count / device.bytes_per_second, efficiency(share))


def crossing(count: float, device: Ceilings) -> Estimate | None:
    """Seconds of sending bytes over the link in one direction; None where the link is not known."""
    if device.link_bytes_per_second is None:
        return None
    share = efficiency("link_share_pcie" if device.link == "pcie" else "link_share")
    return over(count / device.link_bytes_per_second, share)


def each(count: float, known: Constant, unit: float) -> Estimate:
    """So many, each at a constant's cost."""
    return Estimate(value=known.value, low=known.low, high=known.high).scaled(count * unit)


def over(seconds: float, share: Constant) -> Estimate:
    """Seconds at the ceiling, at the share of it that is reached."""
    return Estimate(value=seconds / share.value, low=seconds / share.high, high=seconds / share.low)


def longer(one: Estimate, other: Estimate) -> Estimate:
    """Of two things that run side by side, the one that takes longer."""
    return Estimate(value=max(one.value, other.value), low=max(one.low, other.low), high=max(one.high, other.high))
