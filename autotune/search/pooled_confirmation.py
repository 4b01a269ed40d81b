"""Pool of several confirmations of one candidate: all cycles together, the highest of the peaks.

One long probe cannot separate a fast candidate from a temporarily fast machine, so finalists take
turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autotune.core.answer import Trial
from autotune.core.measurement import Cost, Measurement, Memory, Speed
from autotune.core.verdict import judge


def pooled(confirmations: Sequence[Trial]) -> Trial:
    """Return the confirmations as one trial; a failed one represents all."""
    failed = next((trial for trial in confirmations if not trial.verdict.fits), None)
    if failed is not None or len(confirmations) == 1:
        return failed or confirmations[0]
    measurements = [trial.measurement for trial in confirmations]
    together = replace(
        measurements[-1],
        memory=_highest([one.memory for one in measurements]),
        worst=_all_cycles([one.worst for one in measurements]),
        typical=_all_cycles([one.typical for one in measurements]),
        optimizer_steps=sum(one.optimizer_steps for one in measurements),
        cost=_total_cost(measurements),
    )
    return replace(confirmations[-1], measurement=together, verdict=judge(together))


def _highest(memories: Sequence[Memory]) -> Memory:
    phases = dict.fromkeys(phase for memory in memories for phase in memory.phase_peak_bytes)
    by_phase = {phase: max(memory.phase_peak_bytes.get(phase, 0) for memory in memories) for phase in phases}
    return replace(max(memories, key=lambda memory: memory.peak_bytes or 0), phase_peak_bytes=by_phase)


def _all_cycles(speeds: Sequence[Speed | None]) -> Speed | None:
    known = [speed for speed in speeds if speed is not None]
    if not known:
        return None
    seconds: Counter[str] = Counter()
    for speed in known:
        seconds.update(speed.phase_seconds)
    return replace(
        known[-1],
        cycle_seconds=tuple(cycle for speed in known for cycle in speed.cycle_seconds),
        cycle_loss_tokens=tuple(tokens for speed in known for tokens in speed.cycle_loss_tokens),
        prompt_tokens=sum(speed.prompt_tokens for speed in known),
        phase_seconds=dict(seconds),
        user_reward_seconds=sum(speed.user_reward_seconds for speed in known),
        cut_short=any(speed.cut_short for speed in known),
        runs=sum(speed.runs for speed in known),
    )


def _total_cost(measurements: Sequence[Measurement]) -> Cost:
    costs = [measurement.cost for measurement in measurements]
    names = ("total_seconds", "load_seconds", "setup_seconds", "loop_seconds")
    device = [cost.device_seconds for cost in costs if cost.device_seconds is not None]
    return replace(
        costs[-1],
        **{name: sum(getattr(cost, name) for cost in costs) for name in names},
        device_seconds=sum(device) if len(device) == len(costs) else None,
    )
