"""Pooling: several measurements of one candidate as one.

One long probe cannot separate a fast candidate from a temporarily fast machine, so finalists take
turns. The cycles of all turns together are the evidence about the candidate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autotune.core.answer import Trial
from autotune.core.measurement import Cost, Measurement, Memory, Speed, highest_by_phase, judge

SUMMED_SECONDS = ("total_seconds", "load_seconds", "setup_seconds", "loop_seconds")


def pooled(confirmations: Sequence[Trial]) -> Trial:
    """Return the confirmations of one candidate as one trial; a failed one represents all."""
    for trial in confirmations:
        if not trial.verdict.fits:
            return trial
    last = confirmations[-1]
    if len(confirmations) == 1:
        return last
    measurements = [trial.measurement for trial in confirmations]
    measurement = _pooled_measurement(measurements)
    return replace(last, measurement=measurement, verdict=judge(measurement))


def _pooled_measurement(measurements: Sequence[Measurement]) -> Measurement:
    memories = []
    costs = []
    worst = []
    typical = []
    optimizer_steps = 0
    for measurement in measurements:
        memories.append(measurement.memory)
        costs.append(measurement.cost)
        worst.append(measurement.worst)
        typical.append(measurement.typical)
        optimizer_steps += measurement.optimizer_steps
    return replace(
        measurements[-1],
        memory=_highest_memory(memories),
        worst=_all_cycles(worst),
        typical=_all_cycles(typical),
        optimizer_steps=optimizer_steps,
        cost=_summed_cost(costs),
    )


def _highest_memory(memories: Sequence[Memory]) -> Memory:
    highest = max(memories, key=lambda memory: memory.peak_bytes or 0)
    peaks = []
    for memory in memories:
        for peak in (memory.peak_bytes, memory.lowest_peak_bytes):
            if peak is not None:
                peaks.append(peak)
    return replace(
        highest,
        phase_peak_bytes=highest_by_phase(memories),
        lowest_peak_bytes=min(peaks, default=None),
    )


def _summed_cost(costs: Sequence[Cost]) -> Cost:
    seconds: dict[str, float] = dict.fromkeys(SUMMED_SECONDS, 0)
    device_seconds: float | None = 0
    for cost in costs:
        for name in SUMMED_SECONDS:
            seconds[name] += getattr(cost, name)
        if device_seconds is not None and cost.device_seconds is not None:
            device_seconds += cost.device_seconds
        else:
            device_seconds = None
    return replace(costs[-1], **seconds, device_seconds=device_seconds)


def _all_cycles(speeds: Sequence[Speed | None]) -> Speed | None:
    """Return the cycles of all runs as those of one; None if no run was timed."""
    timed = [speed for speed in speeds if speed is not None]
    if not timed:
        return None
    cycle_seconds: list[float] = []
    cycle_loss_tokens: list[int] = []
    phase_seconds: Counter[str] = Counter()
    for speed in timed:
        cycle_seconds += speed.cycle_seconds
        cycle_loss_tokens += speed.cycle_loss_tokens
        phase_seconds.update(speed.phase_seconds)
    return replace(
        timed[-1],
        cycle_seconds=tuple(cycle_seconds),
        cycle_loss_tokens=tuple(cycle_loss_tokens),
        phase_seconds=dict(phase_seconds),
        prompt_tokens=sum(speed.prompt_tokens for speed in timed),
        user_reward_seconds=sum(speed.user_reward_seconds for speed in timed),
        cut_short=any(speed.cut_short for speed in timed),
        runs=sum(speed.runs for speed in timed),
    )
