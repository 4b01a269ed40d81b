"""One measurement of the parts that the nodes of a slot measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.measurement import (
    Cost,
    DeviceMemory,
    Measurement,
    Memory,
    ModelMemory,
    Outcome,
    Speed,
    highest_by_phase,
)


def merged(parts: Sequence[Measurement]) -> Measurement:
    """Merge the parts: the worst of what limits, the sum of what was trained, the root failure."""
    root = min(parts, key=_blame_order)
    costs = []
    memories = []
    caveats: list[str] = []
    for part in parts:
        costs.append(part.cost)
        memories.append(part.memory)
        caveats += part.caveats
    return replace(
        root,
        memory=_merged_memory(root.memory, memories),
        worst=_merged_speed([part.worst for part in parts]),
        typical=_merged_speed([part.typical for part in parts]),
        cost=_merged_cost(costs),
        optimizer_steps=min(part.optimizer_steps for part in parts),
        caveats=tuple(dict.fromkeys(caveats)),
    )


def _merged_cost(costs: Sequence[Cost]) -> Cost:
    """Return the slowest node's cost with the longest load. Device seconds: the sum, if known."""
    device_seconds: float | None = 0.0
    for cost in costs:
        if cost.device_seconds is None or device_seconds is None:
            device_seconds = None
        else:
            device_seconds += cost.device_seconds
    return replace(
        max(costs, key=lambda cost: cost.total_seconds),
        load_seconds=max(cost.load_seconds for cost in costs),
        device_seconds=device_seconds,
    )


def _merged_memory(of_root: Memory, memories: Sequence[Memory]) -> Memory:
    # The fullest node's memory: each node has a limit of its own.
    fullest = max(
        (memory for memory in memories if memory.peak_bytes is not None),
        key=lambda memory: memory.peak_bytes or 0,
        default=of_root,
    )
    devices: list[DeviceMemory] = []
    models: list[ModelMemory] = []
    for memory in memories:
        devices += memory.devices
        models += memory.models
    return replace(
        fullest,
        phase_peak_bytes=highest_by_phase(memories),
        devices=tuple(devices),
        models=tuple(sorted(models, key=lambda model: model.rank)),
    )


def _blame_order(part: Measurement) -> int:
    """Sort key: out of memory first, then an end from outside, because its peers then report a
    lost rank or time out.
    """
    if part.outcome.is_out_of_memory:
        return 0
    if part.ended_from_outside:
        return 1
    return {Outcome.TIMEOUT: 3, Outcome.OK: 4}.get(part.outcome, 2)


def _merged_speed(speeds: Sequence[Speed | None]) -> Speed | None:
    """Merge the speeds: cycle seconds = max over nodes. None where a node has none."""
    reported = [speed for speed in speeds if speed is not None]
    cycle_counts = {len(speed.cycle_seconds) for speed in reported}
    if len(reported) < len(speeds) or len(cycle_counts) != 1:
        return None
    seconds_by_cycle = zip(*(speed.cycle_seconds for speed in reported), strict=True)
    tokens_by_cycle = zip(*(speed.cycle_loss_tokens for speed in reported), strict=True)
    return replace(
        max(reported, key=lambda speed: sum(speed.cycle_seconds)),
        cycle_seconds=tuple(map(max, seconds_by_cycle)),
        cycle_loss_tokens=tuple(map(sum, tokens_by_cycle)),
        prompt_tokens=sum(speed.prompt_tokens for speed in reported),
        cut_short=any(speed.cut_short for speed in reported),
    )
