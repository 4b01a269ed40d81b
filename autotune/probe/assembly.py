"""Messages of the ranks -> Measurement: merged cycles, combined peaks, root failure. Pure."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

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
)
from autotune.failures.classify import (
    HOST_KILLED,
    Finding,
    ProcessExit,
    ReportedException,
    classify_exception,
    classify_exit,
    classify_launched,
    ended_from_outside,
)
from autotune.probe.message_validation import RankResult, RankSpeed, rank_result
from autotune.worker.protocol import LOST, Message

EXCERPT_CHARACTERS = 4096

SLOW_SHARE = (
    0.25  # A probe with progress in this last share of its deadline counts as slow, not as hung
)


@dataclass(kw_only=True)
class CommandReply:
    """Messages of the ranks in reply to one command."""

    results: dict[int, Message] = field(default_factory=dict)  # `loaded` or `measured`, by rank
    failures: list[Message] = field(
        default_factory=list
    )  # `failed` and `lost`, in order of arrival
    phases: dict[int, Phase] = field(default_factory=dict)  # Last reported phase, by rank
    timed_out: bool = False
    moved_at: float = field(
        default_factory=time.monotonic
    )  # Time of the last sign of progress; of the command itself at first
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
        return any(
            m.get("event") == LOST and m.get("signal") is None and m.get("exit") is None
            for m in self.failures
        )

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
    # The tree was at its limit: a crash of an allocator after a refusal is out of memory too
    full: bool
    host_short: bool = (
        False  # GPU probe only: the machine's memory was nearly exhausted at some moment
    )
    # The probe used the larger part of the machine's used memory: its lack is the candidate's own
    mostly_own: bool = True


def failure_of(
    reply: CommandReply, kernel: KernelReport, device: DeviceKind, seconds: float
) -> tuple[Outcome, Failure]:
    """Return the root failure of a command; ProbeError if the candidate is not its cause."""
    if reply.failures:
        found = [(message, _finding(message, reply, kernel, device)) for message in reply.failures]
        message, finding = min(found, key=lambda pair: _blame_order(pair[1]))
        if finding.transient:
            raise ProbeError(f"The machine was disturbed during a measurement: {finding.evidence}")
        return finding.outcome, _failure(finding, message, reply)
    phase = reply.phase_of(0)
    if reply.worker_lost:
        finding = classify_exit(_ending({}, phase, kernel, device, reply.printed))
        return finding.outcome, _failure(finding, {}, reply)
    evidence = (
        f"no answer after {seconds:.1f} s{f' in phase {phase}' if phase else ''}: ended at its"
        " deadline; "
    )
    # A long step reports no progress: silence does not prove a hang.
    slow = reply.quiet_seconds <= seconds * SLOW_SHARE
    evidence += (
        "slow and not hung, with" if slow else "hung, or in one step that takes longer than that:"
    )
    evidence += (
        f" its last progress {'' if slow else 'was '}{reply.quiet_seconds:.1f} s before"
        f" ({reply.moving})"
    )
    return Outcome.TIMEOUT, Failure(evidence=evidence, phase=phase, excerpt=end_of(reply.printed))


def _blame_order(finding: Finding) -> int:
    """Sort key: out of memory first, then an end from outside; reports of a lost peer last, ties
    by arrival.
    """
    return (0 if finding.outcome.is_out_of_memory else 1 if finding.from_outside else 2) + (
        3 if finding.secondary else 0
    )


def _finding(
    message: Message, reply: CommandReply, kernel: KernelReport, device: DeviceKind
) -> Finding:
    phase: Phase | None = message.get("phase") or reply.phase_of(message.get("rank"))
    error = message.get("error") or {}
    if message["event"] == LOST:
        found = classify_exit(_ending(message, phase, kernel, device, reply.printed))
    elif "ended" in message:
        found = classify_launched(
            _ending(message["ended"], message.get("phase"), kernel, device, reply.printed),
            error["text"],
        )
    else:
        chain = [(link["type"], link["text"]) for link in error.get("chain", [error])]
        own = kernel.out_of_memory and (
            kernel.own_limit or kernel.mostly_own
        )  # killed for memory that the probe itself used
        found = classify_exception(
            ReportedException(
                chain=chain,
                frames=error.get("frames", ()),
                phase=phase,
                device=device,
                limit_hit=own,
                printed=reply.printed,
            )
        )
    if found.row == HOST_KILLED and not (kernel.out_of_memory or kernel.full or kernel.host_short):
        # A message such as "Signal 9 received by PID 7" suggests the OOM killer; its counter denies
        # it.
        return ended_from_outside(found.evidence, ProcessExit(phase=found.phase))
    return found


def _ending(
    message: Message, phase: Phase | None, kernel: KernelReport, device: DeviceKind, printed: str
) -> ProcessExit:
    exhausted: Literal["limit", "machine", "others"] | None = None
    machine: Literal["machine", "others"] = "machine" if kernel.mostly_own else "others"
    if kernel.out_of_memory:
        exhausted = "limit" if kernel.own_limit else machine
    elif kernel.full and message.get("signal") is not None:
        exhausted = "limit"
    elif kernel.host_short and message.get("signal") == signal.SIGKILL:
        exhausted = (
            machine  # killed by a daemon such as systemd-oomd: the kernel's counter omits those
        )
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
    if len(text) <= EXCERPT_CHARACTERS:
        return text
    end = text[-EXCERPT_CHARACTERS:]
    return end.partition("\n")[2] or end


def _failure(finding: Finding, message: Message, reply: CommandReply) -> Failure:
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
    known = [speed for speed in speeds if speed is not None]
    if not known or not all(speed.cycle_seconds for speed in known):
        return None
    slowest = max(known, key=lambda speed: sum(speed.cycle_seconds))
    seconds = tuple(map(max, zip(*(speed.cycle_seconds for speed in known), strict=False)))
    # The slowest rank's phases; waiting for the others in single cycles is `other`.
    phases = {name: spent for name, spent in slowest.phase_seconds.items() if name != "other"}
    return Speed(
        completion_tokens=slowest.completion_tokens,
        cycle_seconds=seconds,
        cycle_loss_tokens=tuple(
            map(sum, zip(*(speed.cycle_loss_tokens for speed in known), strict=False))
        ),
        prompt_tokens=sum(speed.prompt_tokens for speed in known),
        phase_seconds={**phases, "other": max(0.0, sum(seconds) - sum(phases.values()))},
        user_reward_seconds=slowest.user_reward_seconds,
        cut_short=any(speed.cut_short for speed in known),
        borrowed_seconds=slowest.borrowed_seconds,
        drawn=slowest.drawn,
    )


def activity_of(results: Sequence[RankResult]) -> LoopActivity | None:
    """Merge the ranks' activity: the least of every count and length, the worst of every cycle."""
    reported = [result.exercised for result in results if result.exercised is not None]
    if not reported:
        return None
    names = {one.name for one in fields(LoopActivity)} - {"cycles", "seconds"}
    known = {
        name: [value for one in reported if (value := getattr(one, name)) is not None]
        for name in names
    }
    return LoopActivity(
        **{name: min(values) for name, values in known.items() if values},
        seconds=max(one.seconds for one in reported),
        cycles=tuple(
            CycleMemory(
                steps=cycle[0].steps,
                seconds=max(one.seconds for one in cycle),
                peak_bytes=max(one.peak_bytes for one in cycle),
                held_bytes=max(one.held_bytes for one in cycle),
            )
            for cycle in zip(*(one.cycles for one in reported), strict=False)
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peaks of one command, over all ranks."""

    peak_bytes: int | None
    phase_peak_bytes: Mapping[str, int]


def tree_peaks(
    reply: CommandReply, meter_peak: int, meter_phases: Mapping[str, int], ceiling_bytes: int | None
) -> Peaks:
    """Return the CPU peaks. The ranks' own figures are exact; the meter only samples.

    exact peak = usage before + sum over ranks of max(0, peak - base)
    upper bound: max(ceiling, meter peak)
    """
    reports = _reports(reply)

    def combined(figures: Iterable[int | None]) -> int | None:
        pairs = zip(figures, (report.get("base_bytes") for report in reports), strict=True)
        grown = [
            max(0, peak - base) for peak, base in pairs if peak is not None and base is not None
        ]
        if not grown:
            return None
        total: int = reply.usage_before_bytes + sum(grown)
        # The ranks' peaks need not coincide: the cgroup's ceiling may be lower than the sum.
        return total if ceiling_bytes is None else min(total, max(ceiling_bytes, meter_peak))

    results = [rank_result(report) for report in reports]
    exact = combined(result.peak_bytes for result in results)
    phases = dict(meter_phases)
    lost = any(report.get("event") == LOST for report in reports)
    by_phase = [result.phase_peak_bytes or {} for result in results]
    for phase in {phase for peaks in by_phase for phase in peaks}:
        figure = combined(peaks.get(phase) for peaks in by_phase)
        if figure is not None:
            # A lost rank reports nothing: the meter's sample of the tree may be higher.
            phases[phase] = max(figure, phases.get(phase, 0)) if lost else figure
    return Peaks(peak_bytes=max(meter_peak, exact or 0) or None, phase_peak_bytes=phases)


def worst(results: Iterable[RankResult], name: str) -> int | None:
    """Return the largest of the ranks' figures; None where no rank has one."""
    return max(
        (figure for result in results if (figure := getattr(result, name)) is not None),
        default=None,
    )


def models_of(results: Mapping[int, RankResult]) -> tuple[ModelMemory, ...]:
    """Return the bytes of each rank's models, never inferred from another rank. A training rank
    reports its own; a rank that launched a run reports those of the run's ranks.
    """
    own = [
        ModelMemory(rank=rank, bytes=result.model_bytes)
        for rank, result in results.items()
        if result.model_bytes
    ]
    found = own + [one for result in results.values() for one in result.models or ()]
    return tuple(sorted({one.rank: one for one in found}.values(), key=lambda one: one.rank))


def results_of(reply: CommandReply) -> list[RankResult]:
    """Return the results in rank order, then the partial results of failed ranks."""
    return [rank_result(report) for report in _reports(reply)]


def results_by_rank(reply: CommandReply) -> dict[int, RankResult]:
    return {
        int(report["rank"]): rank_result(report)
        for report in _reports(reply)
        if report.get("rank") is not None
    }


def _reports(reply: CommandReply) -> list[Message]:
    return [*(reply.results[rank] for rank in sorted(reply.results)), *reply.failures]
