"""Messages of the ranks -> Measurement: merged cycles, combined peaks. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from autotune.core.measurement import CycleMemory, LoopActivity, ModelMemory, Speed, highest
from autotune.probe.command_reply import CommandReply, reports_of
from autotune.probe.message_validation import RankResult, RankSpeed, rank_result
from autotune.worker.protocol import LOST


def merge_speeds(speeds: Sequence[RankSpeed | None]) -> Speed | None:
    """Merge the ranks' speeds: cycle seconds = max over ranks, loss tokens = sum over ranks."""
    reported = [speed for speed in speeds if speed is not None]
    if not reported or not all(speed.cycle_seconds for speed in reported):
        return None
    slowest = max(reported, key=lambda speed: sum(speed.cycle_seconds))
    seconds_by_cycle = zip(*(speed.cycle_seconds for speed in reported), strict=False)
    seconds = tuple(map(max, seconds_by_cycle))
    tokens_by_cycle = zip(*(speed.cycle_loss_tokens for speed in reported), strict=False)

    # The slowest rank's phases; waiting for the others in single cycles is `other`.
    phase_seconds = dict(slowest.phase_seconds)
    phase_seconds.pop("other", None)
    phase_seconds["other"] = max(0.0, sum(seconds) - sum(phase_seconds.values()))

    return Speed(
        completion_tokens=slowest.completion_tokens,
        cycle_seconds=seconds,
        cycle_loss_tokens=tuple(map(sum, tokens_by_cycle)),
        prompt_tokens=sum(speed.prompt_tokens for speed in reported),
        phase_seconds=phase_seconds,
        user_reward_seconds=slowest.user_reward_seconds,
        cut_short=any(speed.cut_short for speed in reported),
        borrowed_seconds=slowest.borrowed_seconds,
        drawn=slowest.drawn,
        left_out_cycles=slowest.left_out_cycles,
        steady=slowest.steady,
        rank_skew=_rank_skew(reported),
    )


def _rank_skew(speeds: Sequence[RankSpeed]) -> dict[str, float]:
    """Return by how many seconds the ranks differ in each phase. One that is early waits in a later
    phase, so the seconds of whole cycles hide it.
    """
    skew: dict[str, float] = {}
    if len(speeds) > 1:
        for phase in speeds[0].phase_seconds:
            seconds = [speed.phase_seconds.get(phase, 0.0) for speed in speeds]
            skew[phase] = max(seconds) - min(seconds)
    return skew


def lowest_peak(peak_bytes: int | None, results: Iterable[RankResult]) -> int | None:
    """Return the probe's peak without what varied lengths added on a rank; None where none ran."""
    added = []
    for result in results:
        if result.peak_bytes is not None and result.longest_peak_bytes is not None:
            added.append(result.peak_bytes - result.longest_peak_bytes)
    if peak_bytes is None or not added:
        return None
    return peak_bytes - max(0, *added)


def activity_of(results: Sequence[RankResult]) -> LoopActivity | None:
    """Merge the ranks' activity: the least of every count and length, the worst of every cycle."""
    activities = [result.exercised for result in results if result.exercised is not None]
    if not activities:
        return None
    least: dict[str, Any] = {}
    for activity in activities:
        for field_ in fields(LoopActivity):
            name = field_.name
            value = getattr(activity, field_.name)
            if name not in ("cycles", "seconds") and value is not None:
                least[name] = min(value, least.get(name, value))
    cycles = zip(*(activity.cycles for activity in activities), strict=False)
    return LoopActivity(
        **least,
        seconds=max(activity.seconds for activity in activities),
        cycles=tuple(map(_worst_cycle, cycles)),
    )


def _worst_cycle(of_ranks: Sequence[CycleMemory]) -> CycleMemory:
    return CycleMemory(
        steps=of_ranks[0].steps,
        seconds=max(cycle.seconds for cycle in of_ranks),
        peak_bytes=max(cycle.peak_bytes for cycle in of_ranks),
        held_bytes=max(cycle.held_bytes for cycle in of_ranks),
    )


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peaks of one command, over all ranks."""

    peak_bytes: int | None
    phase_peak_bytes: Mapping[str, int]


def tree_peaks(
    reply: CommandReply,
    meter_peak: int,
    meter_phases: Mapping[str, int],
    ceiling_bytes: int | None,
) -> Peaks:
    """Return the CPU peaks. The ranks' own figures are exact; the meter only samples.

    exact peak = usage before + sum over ranks of max(0, peak - base)
    upper bound: max(ceiling, meter peak)
    """
    reports = reports_of(reply)
    results = [rank_result(report) for report in reports]

    def combined(peaks: Iterable[int | None]) -> int | None:
        growths = []
        for report, peak in zip(reports, peaks, strict=True):
            base = report.get("base_bytes")
            if peak is not None and base is not None:
                growths.append(max(0, peak - base))
        if not growths:
            return None
        total: int = reply.usage_before_bytes + sum(growths)
        # The ranks' peaks need not coincide: the cgroup's ceiling may be lower than the sum.
        if ceiling_bytes is None:
            return total
        return min(total, max(ceiling_bytes, meter_peak))

    exact = combined(result.peak_bytes for result in results)
    is_lost = any(report.get("event") == LOST for report in reports)
    peaks_of_ranks = [result.phase_peak_bytes or {} for result in results]
    phase_peaks = dict(meter_phases)
    for phase in set(itertools.chain.from_iterable(peaks_of_ranks)):
        peak = combined(peaks.get(phase) for peaks in peaks_of_ranks)
        if peak is None:
            continue
        if is_lost:  # a lost rank reports nothing: the meter's sample of the tree may be higher
            peak = max(peak, phase_peaks.get(phase, 0))
        phase_peaks[phase] = peak
    return Peaks(peak_bytes=max(meter_peak, exact or 0) or None, phase_peak_bytes=phase_peaks)


def worst(results: Iterable[RankResult], name: str) -> int | None:
    """Return the largest of the ranks' figures; None where no rank has one."""
    return highest(getattr(result, name) for result in results)


def models_of(results: Mapping[int, RankResult]) -> tuple[ModelMemory, ...]:
    """Return the bytes of each rank's models, never inferred from another rank. A training rank
    reports its own; a rank that launched a run reports those of the run's ranks.
    """
    by_rank: dict[int, ModelMemory] = {}
    for rank, result in results.items():
        if result.model_bytes:
            by_rank[rank] = ModelMemory(rank=rank, bytes=result.model_bytes)
    for result in results.values():
        for memory in result.models or ():
            by_rank[memory.rank] = memory
    return tuple(by_rank[rank] for rank in sorted(by_rank))
