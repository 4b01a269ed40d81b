"""Messages of the ranks -> Measurement: merged cycles, combined peaks, root failure. Pure."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from autotune.core.errors import ProbeError
from autotune.core.job import DeviceKind
from autotune.core.measurement import (
    CycleMemory,
    Failure,
    LoopActivity,
    ModelMemory,
    Outcome,
    Phase,
    Speed,
    highest,
)
from autotune.failures.classify import (
    HOST_KILLED,
    classify_exception,
    classify_exit,
    classify_launched,
    ended_from_outside,
)
from autotune.failures.findings import Finding, ProcessExit, ReportedException
from autotune.probe.message_validation import RankResult, RankSpeed, rank_result
from autotune.worker.protocol import LOST, Message

PRINTED_CHARACTERS = 4096

# A probe with progress in this last share of its deadline counts as slow, not as hung.
SLOW_SHARE = 0.25


@dataclass(kw_only=True)
class CommandReply:
    """Messages of the ranks in reply to one command."""

    results: dict[int, Message] = field(default_factory=dict)  # `loaded` or `measured`, by rank
    failures: list[Message] = field(default_factory=list)  # `failed` and `lost`, as they arrived
    phases: dict[int, Phase] = field(default_factory=dict)  # Last reported phase, by rank
    timed_out: bool = False

    moved_at: float = field(default_factory=time.monotonic)
    """Time of the last sign of progress; of the command itself at first."""

    moving: str = "the command was sent"  # Description of that sign
    quiet_seconds: float = 0.0  # Time without progress when the deadline passed
    worker_lost: bool = False
    printed: str = ""  # Output of the processes meanwhile; set only after a failure
    usage_before_bytes: int = 0  # Memory of the tree when the command was sent

    @property
    def ended_well(self) -> bool:
        return not (self.failures or self.timed_out or self.worker_lost)

    @property
    def gone_before(self) -> bool:
        """True if a rank had exited before the command reached it, with unknown status."""
        for failure in self.failures:
            has_status = failure.get("signal") is not None or failure.get("exit") is not None
            if failure.get("event") == LOST and not has_status:
                return True
        return False

    def phase_of(self, rank: int | None) -> Phase | None:
        """Return the rank's last phase; any rank's if that one reported none."""
        if rank in self.phases:
            return self.phases[rank]
        return next(iter(self.phases.values()), None)


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Memory events of the kernel during a command."""

    out_of_memory: bool  # The kernel killed a process for memory, or the meter did in its place
    own_limit: bool  # The probe's limit was reached, not the machine's memory

    full: bool
    """The tree was at its limit: a crash of an allocator after a refusal is out of memory too."""

    host_short: bool = False
    """GPU probe only: the machine's memory was nearly exhausted at some moment."""

    mostly_own: bool = True
    """The probe used the larger part of the machine's used memory: its lack is the candidate's
    own."""

    @property
    def probe_ran_out(self) -> bool:
        """True if a process was killed for memory that the probe itself used."""
        return self.out_of_memory and (self.own_limit or self.mostly_own)

    @property
    def is_about_memory(self) -> bool:
        return self.out_of_memory or self.full or self.host_short


def failure_of(
    reply: CommandReply,
    kernel: KernelReport,
    device: DeviceKind,
    seconds: float,
) -> tuple[Outcome, Failure]:
    """Return the root failure of a command; ProbeError if the candidate is not its cause."""
    if reply.failures:
        return _root_failure(reply, kernel, device)
    phase = reply.phase_of(0)
    if reply.worker_lost:
        finding = classify_exit(_ending({}, phase, kernel, device, reply.printed))
        return finding.outcome, _failure(finding, {}, reply)
    failure = Failure(
        evidence=_deadline_evidence(reply, phase, seconds),
        phase=phase,
        excerpt=end_of(reply.printed),
    )
    return Outcome.TIMEOUT, failure


def _root_failure(
    reply: CommandReply,
    kernel: KernelReport,
    device: DeviceKind,
) -> tuple[Outcome, Failure]:
    findings = []
    for message in reply.failures:
        findings.append((_finding(message, reply, kernel, device), message))
    finding, message = min(findings, key=lambda pair: _blame_order(pair[0]))
    if finding.transient:
        raise ProbeError(f"The machine was disturbed during a measurement: {finding.evidence}")
    return finding.outcome, _failure(finding, message, reply)


def _deadline_evidence(
    reply: CommandReply,
    phase: Phase | None,
    seconds: float,
) -> str:
    place = f" in phase {phase}" if phase else ""
    ending = f"no answer after {seconds:.1f} s{place}: ended at its deadline"
    progress = f"{reply.quiet_seconds:.1f} s before ({reply.moving})"
    # A long step reports no progress: silence does not prove a hang.
    if reply.quiet_seconds <= seconds * SLOW_SHARE:
        return f"{ending}; slow and not hung, with its last progress {progress}"
    return (
        f"{ending}; hung, or in one step that takes longer than that: its last progress was"
        f" {progress}"
    )


def _blame_order(finding: Finding) -> int:
    """Sort key: out of memory first, then an end from outside; reports of a lost peer last, ties
    by arrival.
    """
    if finding.outcome.is_out_of_memory:
        order = 0
    elif finding.from_outside:
        order = 1
    else:
        order = 2
    return order + (3 if finding.secondary else 0)


def _finding(
    message: Message,
    reply: CommandReply,
    kernel: KernelReport,
    device: DeviceKind,
) -> Finding:
    finding = _classified(message, reply, kernel, device)
    if finding.row == HOST_KILLED and not kernel.is_about_memory:
        # A message such as "Signal 9 received by PID 7" suggests the OOM killer; its counter denies
        # it.
        return ended_from_outside(finding.evidence, ProcessExit(phase=finding.phase))
    return finding


def _classified(
    message: Message,
    reply: CommandReply,
    kernel: KernelReport,
    device: DeviceKind,
) -> Finding:
    phase: Phase | None = message.get("phase") or reply.phase_of(message.get("rank"))
    if message["event"] == LOST:
        return classify_exit(_ending(message, phase, kernel, device, reply.printed))
    error = message.get("error") or {}
    if "ended" in message:
        ending = _ending(message["ended"], message.get("phase"), kernel, device, reply.printed)
        return classify_launched(ending, error["text"])
    return classify_exception(
        ReportedException(
            chain=[(link["type"], link["text"]) for link in error.get("chain", [error])],
            frames=error.get("frames", ()),
            phase=phase,
            device=device,
            limit_hit=kernel.probe_ran_out,
            printed=reply.printed,
        )
    )


def _ending(
    message: Message,
    phase: Phase | None,
    kernel: KernelReport,
    device: DeviceKind,
    printed: str,
) -> ProcessExit:
    exhausted: Literal["limit", "machine", "others"] | None = None
    machine: Literal["machine", "others"] = "machine" if kernel.mostly_own else "others"
    if kernel.out_of_memory:
        exhausted = machine
        if kernel.own_limit:
            exhausted = "limit"
    elif kernel.full and message.get("signal") is not None:
        exhausted = "limit"
    elif kernel.host_short and message.get("signal") == signal.SIGKILL:
        # Killed by a daemon such as systemd-oomd: the kernel's counter omits those.
        exhausted = machine
    return ProcessExit(
        signal=message.get("signal"),
        exit=message.get("exit"),
        phase=phase,
        device=device,
        out_of_memory=exhausted,
        printed=printed,
    )


def end_of(text: str) -> str:
    """Return the last whole lines of the text; of one long line its end."""
    if len(text) <= PRINTED_CHARACTERS:
        return text
    end = text[-PRINTED_CHARACTERS:]
    return end.partition("\n")[2] or end


def _failure(
    finding: Finding,
    message: Message,
    reply: CommandReply,
) -> Failure:
    excerpt = (message.get("error") or {}).get("traceback") or reply.printed
    return Failure(
        evidence=finding.evidence,
        phase=finding.phase,
        cause=finding.cause,
        rank=message.get("rank"),
        row=finding.row,
        numbers=finding.numbers,
        excerpt=end_of(excerpt),
        from_outside=finding.from_outside,
    )


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
    reports = _reports(reply)
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


def results_of(reply: CommandReply) -> list[RankResult]:
    """Return the results in rank order, then the partial results of failed ranks."""
    return [rank_result(report) for report in _reports(reply)]


def results_by_rank(reply: CommandReply) -> dict[int, RankResult]:
    results = {}
    for report in _reports(reply):
        if report.get("rank") is not None:
            results[int(report["rank"])] = rank_result(report)
    return results


def _reports(reply: CommandReply) -> list[Message]:
    return [*(reply.results[rank] for rank in sorted(reply.results)), *reply.failures]
