"""What a prediction says in words: what would decide it, and what it took for granted."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.predict import shown
from autotune.predict.timeline import Moment, Scene
from autotune.prediction import Estimate
from autotune.trace import Trace
from autotune.units import format_bytes

TELLING = 0.2
"""Share of the interval's width from which on one of its causes is named."""


def deciding(scene: Scene, top: Moment, room: Estimate, *, engine_may_refuse: bool) -> Iterator[str]:
    """The interval's widest causes."""
    if engine_may_refuse:
        yield "how much of the device is free when the engine starts"
    use = next((use for use in scene.usage.phases if use.phase == top.phase), scene.usage.resting)
    errors = shown.error_bytes(use, scene.basis)
    widths = {
        "what the CUDA context and the kernels loaded into it take": _width(scene.outside.context),
        "what NCCL's buffers take": _width(scene.outside.communication),
        "how far torch's cache fragments, which follows the lengths of earlier batches": use.reserved_high_bytes
        - use.allocated_bytes,
        "how close the stand-in step is to the framework's own": _width(errors) if scene.basis == "generic" else 0.0,
        "how little of a plain step the framework's own kernels keep": float(
            sum(size for part, size in use.parts.items() if part in scene.spared)
        ),
        "how evenly tokens spread over the experts": float(scene.high_extra_bytes),
        "what the engine takes beyond its share": 0.0 if scene.engine is None else _width(scene.engine.held(top.phase)),
        "how much of its memory the driver keeps for itself": _width(room),
    }
    whole = sum(widths.values())
    named = sorted(((width, cause) for cause, width in widths.items() if width > 0 and width >= TELLING * whole), reverse=True)
    yield from (cause for _, cause in named)
    if not named and not engine_may_refuse:
        yield "figures that are known only within an interval, none of which stands out"


def crowding(peak: Estimate, room: Estimate, device_memory_bytes: int, *, retried: bool) -> Iterator[str]:
    if room.value < device_memory_bytes and room.low < peak.high:
        yield (
            f"CUDA offers {format_bytes(device_memory_bytes - room.value)} less than the device has"
            if _binds(room)
            else ("the limit is below what the device has")
        )
    if retried:
        yield "torch may reserve all there is, give its cache back and try again: it goes on, but slower"
    elif shown.CROWDED * device_memory_bytes < peak.value <= device_memory_bytes:
        yield f"the peak is above {shown.CROWDED:.0%} of the device, where torch gives its cache back and tries again: uncertain"


def stand_ins(trace: Trace) -> Iterator[str]:
    if trace.basis == "generic":
        yield "a plain step stands in for the framework's own"
    if trace.high_extra_bytes:
        yield f"up to {format_bytes(trace.high_extra_bytes)} more if tokens crowd onto few experts"


def _binds(room: Estimate) -> bool:
    """Whether it is the driver and not the limit that bounds it: only the driver's part is uncertain."""
    return room.low < room.high


def _width(estimate: Estimate) -> float:
    return estimate.high - estimate.low
