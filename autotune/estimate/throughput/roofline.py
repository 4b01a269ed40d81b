"""Roofline of a device: peak rates, and the share of them that real work reaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.catalog import Gpu
from autotune.catalog.constants import Constant
from autotune.catalog.efficiency import efficiency
from autotune.core.prediction import Estimate
from autotune.estimate.constant_estimates import as_estimate

GB = 10**9
TERA = 10**12
EMULATION_FACTOR = 2
"""Largest slowdown of a half precision that is computed in float32, with conversions."""


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Peak rates of one device."""

    flops: Mapping[str, float]  # per second, by dtype
    bytes_per_second: float
    link_bytes_per_second: float | None = None
    link: str | None = None
    half_is_emulated: frozenset[str] = field(default_factory=frozenset)  # dtypes without tensor cores


def ceilings(gpu: Gpu) -> Ceilings | None:
    """Return the peak rates of a catalogued GPU; None if its speed is not in the catalogue."""
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


def compute_seconds(flops: Mapping[str, float], device: Ceilings) -> Estimate:
    """Matrix products and attention: sum over dtypes of flops / (peak · share)."""
    total = Estimate.exactly(0)
    for dtype, count in flops.items():
        peak = device.flops.get(dtype, device.flops["float32"])
        share = efficiency("matmul_share_float32" if peak == device.flops["float32"] else "matmul_share")
        slowdown = EMULATION_FACTOR if dtype in device.half_is_emulated else 1
        known = over(count / peak, share)
        total = total + Estimate(value=known.value, low=known.low, high=known.high * slowdown)
    return total


def memory_seconds(count: float, device: Ceilings, *, share: str = "memory_share") -> Estimate:
    """Reading or writing: bytes / (bandwidth · share)."""
    return over(count / device.bytes_per_second, efficiency(share))


def link_seconds(count: float, device: Ceilings) -> Estimate | None:
    """Sending in one direction: bytes / (link · share); None if the link is unknown."""
    if device.link_bytes_per_second is None:
        return None
    share = efficiency("link_share_pcie" if device.link == "pcie" else "link_share")
    return over(count / device.link_bytes_per_second, share)


def overhead_seconds(count: float, known: Constant, unit: float) -> Estimate:
    """Overhead: count · constant · unit."""
    return as_estimate(known).scaled(count * unit)


def over(seconds: float, share: Constant) -> Estimate:
    """Divide seconds at the peak rate by the share that is reached."""
    return Estimate(value=seconds / share.value, low=seconds / share.high, high=seconds / share.low)


def longer(one: Estimate, other: Estimate) -> Estimate:
    """Return the time of two concurrent activities: the maximum of each end."""
    return Estimate(value=max(one.value, other.value), low=max(one.low, other.low), high=max(one.high, other.high))
