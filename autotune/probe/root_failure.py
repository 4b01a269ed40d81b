"""Root failure of a command: the rank's message that is the cause, with the kernel's events."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from autotune.core.errors import ProbeError
from autotune.core.job import DeviceKind
from autotune.core.measurement import Failure, Outcome, Phase
from autotune.failures.classify import (
    HOST_KILLED,
    classify_exception,
    classify_exit,
    classify_launched,
    ended_from_outside,
)
from autotune.failures.findings import Finding, ProcessExit, ReportedException
from autotune.probe.command_reply import CommandReply
from autotune.worker.protocol import LOST, Message

PRINTED_CHARACTERS = 4096

# A probe with progress in this last share of its deadline counts as slow, not as hung.
SLOW_SHARE = 0.25


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
