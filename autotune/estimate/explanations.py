"""Texts of a prediction: causes of an open verdict, and assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.core.prediction import Estimate
from autotune.core.trace import Trace
from autotune.core.units import format_bytes
from autotune.estimate import device_memory
from autotune.estimate.timeline import Scene, TimelinePoint

NAMED_SHARE = 0.2
"""Share of the interval's width from which on a cause is named."""


def deciding(scene: Scene, top: TimelinePoint, room: Estimate, *, engine_may_refuse: bool) -> Iterator[str]:
    """Yield the widest causes of the interval."""
    if engine_may_refuse:
        yield "free memory of the device when the engine starts"
    use = next((use for use in scene.usage.phases if use.phase == top.phase), scene.usage.resting)
    errors = device_memory.error_bytes(use, scene.basis)
    widths = {
        "size of the CUDA context and its kernels": _width(scene.outside.context),
        "size of NCCL's buffers": _width(scene.outside.communication),
        "fragmentation of torch's cache, which depends on the lengths of earlier batches": float(
            use.reserved_high_bytes - use.allocated_bytes
        ),
        "difference between the generic step and the framework's own": _width(errors) if scene.basis == "generic" else 0.0,
        "memory that the framework's fused kernels save": float(
            sum(size for part, size in use.parts.items() if part in scene.fused_parts)
        ),
        "distribution of tokens over the experts": float(scene.high_extra_bytes),
        "engine memory beyond its share": 0.0 if scene.engine is None else _width(scene.engine.held(top.phase)),
        "memory reserved by the driver": _width(room),
    }
    whole = sum(widths.values())
    named = sorted(((width, cause) for cause, width in widths.items() if 0 < width >= NAMED_SHARE * whole), reverse=True)
    yield from (cause for _, cause in named)
    if not named and not engine_may_refuse:
        yield "several uncertain figures, none of them dominant"


def crowding(peak: Estimate, room: Estimate, device_memory_bytes: int, *, retried: bool) -> Iterator[str]:
    if room.value < device_memory_bytes and room.low < peak.high:
        by_driver = room.low < room.high  # the driver's part alone is uncertain; a limit is exact
        less = f"CUDA offers {format_bytes(device_memory_bytes - room.value)} less than the device has"
        yield less if by_driver else "the limit is below what the device has"
    if retried:
        yield "torch may reserve up to the limit, empty its cache and retry: slower, without failure"
    elif device_memory.CROWDED * device_memory_bytes < peak.value <= device_memory_bytes:
        yield (
            f"the peak is above {device_memory.CROWDED:.0%} of the device, where torch empties its cache and retries: uncertain"
        )


def stand_ins(trace: Trace) -> Iterator[str]:
    if trace.basis == "generic":
        yield "a generic step replaces the framework's own"
    if trace.high_extra_bytes:
        yield f"up to {format_bytes(trace.high_extra_bytes)} more if tokens concentrate on few experts"


def _width(estimate: Estimate) -> float:
    return estimate.high - estimate.low
