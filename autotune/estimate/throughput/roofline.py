"""Roofline of a device: peak rates, and the share of them that real work reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.catalog import Gpu
from autotune.catalog.constants import Constant, efficiency
from autotune.core.prediction import Estimate

GB = 10**9
TERA = 10**12
MICRO, MILLI = 1e-6, 1e-3
ATTENTION = "attention:"  # prefix of the dtype of attention kernels' FLOPs
EMULATION_FACTOR = 2  # largest slowdown of a half precision that is computed in float32, with conversions


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Peak rates of one device."""

    flops: Mapping[str, float]  # per second, by dtype
    bytes_per_second: float
    link_bytes_per_second: float | None = None
    link: str | None = None
    best_matmul_share: float | None = None  # of the tensor cores' peak; None: not known
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
        best_matmul_share=gpu.matmul_share,
        half_is_emulated=emulated,
    )


def compute_seconds(flops: Mapping[str, float], device: Ceilings) -> Estimate:
    """Matrix products and attention: sum over dtypes of flops / (peak · share)."""
    total = Estimate.exactly(0)
    for key, count in flops.items():
        dtype = key.removeprefix(ATTENTION)
        peak = device.flops.get(dtype, device.flops["float32"])
        known = _over(count / peak, _share(device, dtype, attention=key != dtype))
        slowdown = EMULATION_FACTOR if dtype in device.half_is_emulated else 1
        total = total + Estimate(value=known.value, low=known.low, high=known.high * slowdown)
    return total


def _share(device: Ceilings, dtype: str, *, attention: bool) -> Estimate:
    """Return the share of the peak that arithmetic in this dtype reaches."""
    if attention:
        return efficiency("attention_share")
    if device.flops.get(dtype, device.flops["float32"]) == device.flops["float32"]:
        return efficiency("matmul_share_float32")
    of_best, known = efficiency("matmul_share"), device.best_matmul_share
    best = efficiency("best_matmul_share") if known is None else Estimate.exactly(known)
    return Estimate(value=best.value * of_best.value, low=best.low * of_best.low, high=best.high * of_best.high)


def memory_seconds(count: float, device: Ceilings, *, share: str = "memory_share") -> Estimate:
    """Reading or writing: bytes / (bandwidth · share)."""
    return _over(count / device.bytes_per_second, efficiency(share))


def link_seconds(count: float, device: Ceilings) -> Estimate | None:
    """Sending in one direction: bytes / (link · share); None if the link is unknown."""
    if device.link_bytes_per_second is None:
        return None
    share = efficiency("link_share_pcie" if device.link == "pcie" else "link_share")
    return _over(count / device.link_bytes_per_second, share)


def overhead_seconds(count: float, known: Constant, unit: float) -> Estimate:
    """Overhead: count · constant · unit."""
    return known.scaled(count * unit)


def _over(seconds: float, share: Estimate) -> Estimate:
    """Divide seconds at the peak rate by the share that is reached."""
    return Estimate(value=seconds / share.value, low=seconds / share.high, high=seconds / share.low)


def independent(*parts: Estimate) -> Estimate:
    """Add times whose errors have different causes: distances to the bounds add in quadrature."""
    value = sum(part.value for part in parts)
    below = math.hypot(*(part.value - part.low for part in parts))
    above = math.hypot(*(part.high - part.value for part in parts))
    return Estimate(value=value, low=max(0.0, value - below), high=value + above)
