"""A single Measurement out of the parts of a probe that ran on several nodes. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.core.measurement import Cost, Measurement, Memory, Outcome, Speed


def merged(parts: Sequence[Measurement]) -> Measurement:
    """Merge the parts: the worst of what limits, the sum of what was trained, the root failure."""
    first = min(parts, key=_blame_order)
    return replace(
        first,
        memory=_worst_memory([part.memory for part in parts], first.memory),
        worst=_merged_speed([part.worst for part in parts]),
        typical=_merged_speed([part.typical for part in parts]),
        cost=_merged_cost([part.cost for part in parts]),
        optimizer_steps=min(part.optimizer_steps for part in parts),
        caveats=tuple(dict.fromkeys(words for part in parts for words in part.caveats)),
    )


def _blame_order(part: Measurement) -> int:
    """Sort key: out of memory first, then an end from outside, because its peers then report a lost
    rank or time out."""
    outcome = part.outcome
    if outcome.is_out_of_memory or part.ended_from_outside:
        return 0 if outcome.is_out_of_memory else 1
    return 4 if outcome is Outcome.OK else 3 if outcome is Outcome.TIMEOUT else 2


def _worst_memory(memories: Sequence[Memory], default: Memory) -> Memory:
    """Return the fullest node's memory: each node has a limit of its own."""
    fullest = max(
        (memory for memory in memories if memory.peak_bytes is not None), key=lambda m: m.peak_bytes or 0, default=default
    )
    phases = dict.fromkeys(phase for memory in memories for phase in memory.phase_peak_bytes)
    return replace(
        fullest,
        phase_peak_bytes={phase: max(memory.phase_peak_bytes.get(phase, 0) for memory in memories) for phase in phases},
        devices=tuple(device for memory in memories for device in memory.devices),
        models=tuple(sorted((one for memory in memories for one in memory.models), key=lambda one: one.rank)),
    )


def _merged_speed(speeds: Sequence[Speed | None]) -> Speed | None:
    """Merge the speeds: cycle seconds = max over nodes. None where a node has none."""
    known = [speed for speed in speeds if speed is not None]
    if len(known) < len(speeds) or len({len(speed.cycle_seconds) for speed in known}) != 1:
        return None
    return replace(
        max(known, key=lambda speed: sum(speed.cycle_seconds)),
        cycle_seconds=tuple(map(max, zip(*(speed.cycle_seconds for speed in known), strict=True))),
        cycle_loss_tokens=tuple(map(sum, zip(*(speed.cycle_loss_tokens for speed in known), strict=True))),
        prompt_tokens=sum(speed.prompt_tokens for speed in known),
        cut_short=any(speed.cut_short for speed in known),
    )


def _merged_cost(costs: Sequence[Cost]) -> Cost:
    held = [cost.device_seconds for cost in costs if cost.device_seconds is not None]
    return replace(
        max(costs, key=lambda cost: cost.total_seconds),
        load_seconds=max(cost.load_seconds for cost in costs),
        device_seconds=sum(held) if len(held) == len(costs) else None,
    )
