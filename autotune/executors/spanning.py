"""One probe that ran on several nodes, as one measurement: what each node's ranks found, put together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.measurement import Cost, Measurement, Memory, Outcome, Speed


def merged(parts: Sequence[Measurement]) -> Measurement:
    """The worst of what limits, the sum of what was trained; the failure that says the most where any failed."""
    told = min(parts, key=_blame)
    return replace(
        told,
        memory=_worst([part.memory for part in parts], told.memory),
        worst=_together([part.worst for part in parts]),
        typical=_together([part.typical for part in parts]),
        cost=_cost([part.cost for part in parts]),
        optimizer_steps=min(part.optimizer_steps for part in parts),
        caveats=tuple(dict.fromkeys(words for part in parts for words in part.caveats)),
    )


def _blame(part: Measurement) -> int:
    """Out of memory before anything else: a peer of one that ran out only complains that it is lost, or waits until the end."""
    outcome = part.outcome
    return 0 if outcome.is_out_of_memory else 3 if outcome is Outcome.OK else 2 if outcome is Outcome.TIMEOUT else 1


def _worst(memories: Sequence[Memory], told: Memory) -> Memory:
    """The fullest node's; every node's limit binds it alone."""
    known = [memory for memory in memories if memory.peak_bytes is not None]
    fullest = max(known, key=lambda memory: memory.peak_bytes or 0) if known else told
    by_phase: dict[str, int] = {}
    for memory in memories:
        for phase, peak in memory.phase_peak_bytes.items():
            by_phase[phase] = max(peak, by_phase.get(phase, 0))
    devices = tuple(device for memory in memories for device in memory.devices)
    models = tuple(sorted((one for memory in memories for one in memory.models), key=lambda one: one.rank))
    return replace(fullest, phase_peak_bytes=by_phase, devices=devices, models=models)


def _together(speeds: Sequence[Speed | None]) -> Speed | None:
    """A cycle takes as long as on the slowest node. None where any node has none."""
    known = [speed for speed in speeds if speed is not None]
    if len(known) < len(speeds) or len({len(speed.cycle_seconds) for speed in known}) != 1:
        return None
    slowest = max(known, key=lambda speed: sum(speed.cycle_seconds))
    return replace(
        slowest,
        cycle_seconds=tuple(map(max, zip(*(speed.cycle_seconds for speed in known), strict=True))),
        cycle_loss_tokens=tuple(map(sum, zip(*(speed.cycle_loss_tokens for speed in known), strict=True))),
        prompt_tokens=sum(speed.prompt_tokens for speed in known),
        cut_short=any(speed.cut_short for speed in known),
    )


def _cost(costs: Sequence[Cost]) -> Cost:
    longest = max(costs, key=lambda cost: cost.total_seconds)
    held = [cost.device_seconds for cost in costs if cost.device_seconds is not None]
    return replace(
        longest,
        load_seconds=max(cost.load_seconds for cost in costs),
        device_seconds=sum(held) if len(held) == len(costs) else None,
    )
