"""Several confirmations of one candidate as one: all cycles together, the highest of the peaks.

One long probe cannot tell a fast candidate from a machine that was fast just then. Finalists take turns
instead, and what each showed over all its turns is what it is judged by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from autotune.measurement import Cost, Measurement, Memory, Speed
from autotune.recommendation import Trial
from autotune.verdict import judge


def pooled(confirmations: Sequence[Trial]) -> Trial:
    """The candidate's confirmations as one trial; one that failed speaks for all."""
    failed = next((trial for trial in confirmations if not trial.verdict.fits), None)
    if failed is not None or len(confirmations) == 1:
        return failed or confirmations[0]
    last = confirmations[-1].measurement
    all_of_them = [trial.measurement for trial in confirmations]
    together = replace(
        last,
        memory=_highest([measurement.memory for measurement in all_of_them]),
        worst=_all_cycles([measurement.worst for measurement in all_of_them]),
        typical=_all_cycles([measurement.typical for measurement in all_of_them]),
        optimizer_steps=sum(measurement.optimizer_steps for measurement in all_of_them),
        cost=_all_costs(all_of_them),
    )
    return replace(confirmations[-1], measurement=together, verdict=judge(together))


def _highest(memories: Sequence[Memory]) -> Memory:
    by_phase: dict[str, int] = {}
    for memory in memories:
        for phase, peak in memory.phase_peak_bytes.items():
            by_phase[phase] = max(peak, by_phase.get(phase, 0))
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
    )


def _all_costs(measurements: Sequence[Measurement]) -> Cost:
    costs = [measurement.cost for measurement in measurements]
    held = [cost.device_seconds for cost in costs if cost.device_seconds is not None]
    return replace(
        costs[-1],
        total_seconds=sum(cost.total_seconds for cost in costs),
        load_seconds=sum(cost.load_seconds for cost in costs),
        setup_seconds=sum(cost.setup_seconds for cost in costs),
        loop_seconds=sum(cost.loop_seconds for cost in costs),
        device_seconds=sum(held) if len(held) == len(costs) else None,
    )
