"""Messages of the ranks -> Measurement: merged cycles, combined peaks, root failure. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from autotune.core.errors import ProbeError
from autotune.core.hardware import DeviceKind
from autotune.core.measurement import CycleMemory, Failure, LoopActivity, ModelMemory, Outcome, Phase, Speed
from autotune.failures import (
    HOST_KILLED,
    Finding,
    ProcessExit,
    ReportedException,
    classify_exception,
    classify_exit,
    classify_launched,
    ended_from_outside,
)
from autotune.probe.command_exchange import CommandReply
from autotune.worker.protocol import LOST, Message

EXCERPT_CHARACTERS = 4096

SLOW_SHARE = 0.25  # A probe with progress in this last share of its deadline counts as slow, not as hung


@dataclass(frozen=True, kw_only=True)
class KernelReport:
    """Memory events of the kernel during a command."""

    out_of_memory: bool  # The kernel killed a process for memory, or the meter did in its place
    own_limit: bool  # The probe's limit was reached, not the machine's memory
    full: bool
    """The tree was at its limit: a crash of an allocator after a refusal is out of memory too."""

    host_short: bool = False  # GPU probe only: the machine's memory was nearly exhausted at some moment
    mostly_own: bool = True
    """The probe used the larger part of the machine's used memory: its lack is the candidate's own."""

    @property
    def by_the_probe(self) -> bool:
        """True if the kernel killed for memory that the probe itself used."""
        return self.out_of_memory and (self.own_limit or self.mostly_own)

    @property
    def saw_shortage(self) -> bool:
        return self.out_of_memory or self.full or self.host_short


def failure_of(reply: CommandReply, kernel: KernelReport, device: DeviceKind, seconds: float) -> tuple[Outcome, Failure]:
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
    where = f" in phase {phase}" if phase else ""
    evidence = f"no answer after {seconds:.1f} s{where}: ended at its deadline; {_slow_or_hung(reply, seconds)}"
    return Outcome.TIMEOUT, Failure(evidence=evidence, phase=phase, excerpt=end_of(reply.printed))


def _slow_or_hung(reply: CommandReply, seconds: float) -> str:
    """Describe the last progress. A long step reports none: silence does not prove a hang."""
    last = f"{reply.quiet_seconds:.1f} s before ({reply.moving})"
    if reply.quiet_seconds <= seconds * SLOW_SHARE:
        return f"slow and not hung, with its last progress {last}"
    return f"hung, or in one step that takes longer than that: its last progress was {last}"


def _blame_order(finding: Finding) -> int:
    """Sort key: out of memory first, then an end from outside; reports of a lost peer last, ties
    by arrival."""
    return (0 if finding.outcome.is_out_of_memory else 1 if finding.from_outside else 2) + (3 if finding.secondary else 0)


def _finding(message: Message, reply: CommandReply, kernel: KernelReport, device: DeviceKind) -> Finding:
    found = _classified(message, reply, kernel, device)
    if found.row == HOST_KILLED and not kernel.saw_shortage:
        # A message such as "Signal 9 received by PID 7" suggests the OOM killer; its counter denies it.
        return ended_from_outside(found.evidence, ProcessExit(phase=found.phase))
    return found


def _classified(message: Message, reply: CommandReply, kernel: KernelReport, device: DeviceKind) -> Finding:
    phase: Phase | None = message.get("phase") or reply.phase_of(message.get("rank"))
    if message["event"] == LOST:
        return classify_exit(_ending(message, phase, kernel, device, reply.printed))
    error = message["error"]
    if "ended" in message:
        return classify_launched(_ending(message["ended"], message.get("phase"), kernel, device, reply.printed), error["text"])
    chain = [(link["type"], link["text"]) for link in error.get("chain", [error])]
    return classify_exception(
        ReportedException(
            chain=chain, frames=error.get("frames", ()), phase=phase, device=device, limit_hit=kernel.by_the_probe,
            printed=reply.printed,
        )
    )  # fmt: skip


def _ending(message: Message, phase: Phase | None, kernel: KernelReport, device: DeviceKind, printed: str) -> ProcessExit:
    exhausted: Literal["limit", "machine", "others"] | None = None
    machine: Literal["machine", "others"] = "machine" if kernel.mostly_own else "others"
    if kernel.out_of_memory:
        exhausted = "limit" if kernel.own_limit else machine
    elif kernel.full and message.get("signal") is not None:
        exhausted = "limit"
    elif kernel.host_short and message.get("signal") == signal.SIGKILL:
        exhausted = machine  # killed by a daemon such as systemd-oomd: the kernel's counter omits those
    return ProcessExit(
        signal=message.get("signal"), exit=message.get("exit"), phase=phase, device=device, out_of_memory=exhausted,
        printed=printed,
    )  # fmt: skip


def end_of(text: str) -> str:
    """Return the last whole lines of the text; of one long line its end."""
    if len(text) <= EXCERPT_CHARACTERS:
        return text
    end = text[-EXCERPT_CHARACTERS:]
    return end.partition("\n")[2] or end


def _failure(finding: Finding, message: Message, reply: CommandReply) -> Failure:
    excerpt = (message.get("error") or {}).get("traceback") or reply.printed
    return Failure(
        evidence=finding.evidence, phase=finding.phase, cause=finding.cause, rank=message.get("rank"), row=finding.row,
        numbers=finding.numbers, excerpt=end_of(excerpt), from_outside=finding.from_outside,
    )  # fmt: skip


def merge_speeds(speeds: Sequence[Mapping[str, Any]]) -> Speed | None:
    """Merge the ranks' speeds: cycle seconds = max over ranks, loss tokens = sum over ranks."""
    if not speeds or not all(speed["cycle_seconds"] for speed in speeds):
        return None
    slowest = max(speeds, key=lambda speed: sum(speed["cycle_seconds"]))
    seconds = tuple(map(max, zip(*(speed["cycle_seconds"] for speed in speeds), strict=False)))
    # The slowest rank's phases; waiting for the others in single cycles is `other`.
    phases = {name: float(spent) for name, spent in slowest.get("phase_seconds", {}).items() if name != "other"}
    return Speed(
        completion_tokens=int(slowest["completion_tokens"]),
        cycle_seconds=seconds,
        cycle_loss_tokens=tuple(map(sum, zip(*(speed["cycle_loss_tokens"] for speed in speeds), strict=False))),
        prompt_tokens=sum(int(speed["prompt_tokens"]) for speed in speeds),
        phase_seconds={**phases, "other": max(0.0, sum(seconds) - sum(phases.values()))},
        user_reward_seconds=float(slowest.get("user_reward_seconds", 0.0)),
        cut_short=any(speed.get("cut_short", False) for speed in speeds),
        borrowed_seconds=float(slowest.get("borrowed_seconds", 0.0)),
        drawn=bool(slowest.get("drawn", False)),
    )


def activity_of(bodies: Sequence[Mapping[str, Any]]) -> LoopActivity | None:
    """Merge the ranks' activity: the least of every count and length, the worst of every cycle."""
    reported = [body["exercised"] for body in bodies if body.get("exercised")]
    if not reported:
        return None
    names = {one.name for one in fields(LoopActivity)} - {"cycles", "seconds"}
    known = {name: [one[name] for one in reported if one.get(name) is not None] for name in names}
    return LoopActivity(
        **{name: min(values) for name, values in known.items() if values},
        seconds=max(float(one.get("seconds") or 0.0) for one in reported),
        cycles=tuple(_worst_cycle(cycle) for cycle in zip(*(one.get("cycles") or () for one in reported), strict=False)),
    )


def _worst_cycle(cycle: Sequence[Mapping[str, Any]]) -> CycleMemory:
    return CycleMemory(
        steps=int(cycle[0]["steps"]),
        seconds=max(float(one["seconds"]) for one in cycle),
        peak_bytes=max(int(one["peak_bytes"]) for one in cycle),
        held_bytes=max(int(one["held_bytes"]) for one in cycle),
    )


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peaks of one command, over all ranks."""

    peak_bytes: int | None
    phase_peak_bytes: Mapping[str, int]


def tree_peaks(reply: CommandReply, meter_peak: int, meter_phases: Mapping[str, int], ceiling_bytes: int | None) -> Peaks:
    """Return the CPU peaks. The ranks' own figures are exact; the meter only samples.

    exact peak = usage before + sum over ranks of max(0, peak - base)
    upper bound: max(ceiling, meter peak)
    """
    reports = _reports(reply)

    def combined(figures: Iterable[int | None]) -> int | None:
        pairs = zip(figures, (report.get("base_bytes") for report in reports), strict=True)
        grown = [max(0, peak - base) for peak, base in pairs if peak is not None and base is not None]
        if not grown:
            return None
        total: int = reply.usage_before_bytes + sum(grown)
        # The ranks' peaks need not coincide: the cgroup's ceiling may be lower than the sum.
        return total if ceiling_bytes is None else min(total, max(ceiling_bytes, meter_peak))

    bodies = [_body(report) for report in reports]
    exact = combined(body.get("peak_bytes") for body in bodies)
    phases = dict(meter_phases)
    lost = any(report.get("event") == LOST for report in reports)
    for phase in {name for body in bodies for name in body.get("phase_peak_bytes") or {}}:
        figure = combined((body.get("phase_peak_bytes") or {}).get(phase) for body in bodies)
        if figure is not None:
            # A lost rank reports nothing: the meter's sample of the tree may be higher.
            phases[phase] = max(figure, phases.get(phase, 0)) if lost else figure
    return Peaks(peak_bytes=max(meter_peak, exact or 0) or None, phase_peak_bytes=phases)


def worst(bodies: Iterable[Mapping[str, Any]], name: str) -> int | None:
    """Return the largest of the ranks' figures; None where no rank has one."""
    known = [int(body[name]) for body in bodies if body.get(name) is not None]
    return max(known, default=None)


def models_of(bodies: Mapping[int, Mapping[str, Any]]) -> tuple[ModelMemory, ...]:
    """Return the bytes of each rank's models, never inferred from another rank.

    A training rank reports its own; a rank that launched a run reports those of the run's ranks.
    """
    own = {rank: body["model_bytes"] for rank, body in bodies.items() if body.get("model_bytes")}
    started = {int(one["rank"]): one["bytes"] for body in bodies.values() for one in body.get("models") or ()}
    return tuple(ModelMemory(rank=rank, bytes=dict(parts)) for rank, parts in sorted({**own, **started}.items()))


def bodies_of(reply: CommandReply) -> list[Mapping[str, Any]]:
    """Return the results in rank order, then the partial results of failed ranks."""
    return [_body(report) for report in _reports(reply)]


def bodies_by_rank(reply: CommandReply) -> dict[int, Mapping[str, Any]]:
    return {int(report["rank"]): _body(report) for report in _reports(reply) if report.get("rank") is not None}


def _reports(reply: CommandReply) -> list[Message]:
    return [*(reply.results[rank] for rank in sorted(reply.results)), *reply.failures]


def _body(report: Message) -> Mapping[str, Any]:
    body = report.get("result") or report.get("partial") or {}
    return {**body, **body.get("memory", {})} if isinstance(body, dict) else {}
