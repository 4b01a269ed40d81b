"""Cause of a training's end, and what to do about it.

The output is diagnosed like any log. The exit status, the kernel's counter of processes that it
ended, and what the guard itself requested add what no log contains.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from enum import StrEnum

from autotune.core.measurement import PHASES
from autotune.diagnosis import Diagnosis, diagnose
from autotune.failures.classify import HOST_KILLED
from autotune.guard.attempt import STOPPING, TO_THE_LEADER, ProcessEnd

SIGNALLED = 128  # exit codes of a shell above this are those of signals

PHASE_BY_NAME = {str(phase): phase for phase in PHASES}  # others have no part in a cycle
MACHINE_CAUSES = frozenset({"hang_or_nccl", "network"})
GPU_FAULT = "cuda_fault"
# Faults on a GPU that a program causes itself: they come back.
OF_THE_PROGRAM = (
    "device-side assert",
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "invalid device function",
)

# What a scheduler or Ray states at the end of the output, where no rank could print why it ended.
STATED_LINES = 60  # at the end of the output
LOST_NODE = re.compile(
    r"srun: error: Node failure on|CANCELLED AT \S+ DUE TO (?:NODE FAILURE|PREEMPTION|JOB REQUEUE)"
    r"|because its node has died|\bNodeDiedError\b"
)
STATED_STOP = re.compile(
    r"CANCELLED AT \S+ (?:DUE TO TIME LIMIT )?\*\*\*|SignalException: Process \d+ got signal: \d+"
)
FAILED_TASK = "Exited with exit code"  # of srun, which then cancels the other tasks
KILLED_WORKER = re.compile(r"because its worker process has died")
CRASHED_WORKER = re.compile(r"\*\*\* SIG[A-Z]+ received|Segmentation fault|Fatal Python error")


class Reason(StrEnum):
    """Reason of an end."""

    FINISHED = "finished"
    STOPPED = "stopped"  # by a signal to the guard, or to the command by somebody else
    MEMORY = "memory"
    MACHINE = "machine"  # a lost GPU, a collective that timed out, a process that was killed
    EARLY = "early"  # asked to save before memory runs out
    HANG = "hang"
    SCRIPT = "script"  # an error of the script or its settings: never tried again


@dataclass(frozen=True, kw_only=True)
class HostEvidence:
    """Evidence of the machine about host memory during one attempt."""

    kills: int = 0  # processes that the kernel ended for want of memory
    was_short: bool = False


@dataclass(frozen=True, kw_only=True)
class Ending:
    """End of one attempt."""

    reason: Reason
    end: ProcessEnd
    cause: str | None = None  # of the failure tables
    evidence: str = ""  # line that decided it
    diagnosis: Diagnosis | None = None

    @property
    def is_out_of_memory(self) -> bool:
        return self.reason == Reason.MEMORY


def ending_of(
    end: ProcessEnd,
    output: str,
    host: HostEvidence,
    *,
    stop_requested: bool,
    requested: Reason | None = None,
) -> Ending:
    """Classify one end. `requested`: the guard itself ended the attempt, for this reason."""
    if requested is not None and not stop_requested:
        return Ending(reason=requested, end=end)
    if end.exit == 0:
        return Ending(reason=Reason.FINISHED, end=end)
    if stop_requested:
        return Ending(reason=Reason.STOPPED, end=end)

    diagnosis = diagnose(output)
    ending = Ending(
        reason=Reason.SCRIPT,
        end=end,
        cause=diagnosis.cause,
        evidence=diagnosis.evidence,
        diagnosis=diagnosis,
    )
    number = _signal_of(end)
    if number == signal.SIGKILL or _names_a_killed_process(diagnosis):
        return _of_a_killed_process(ending, host)
    if diagnosis.is_memory:
        return replace(ending, reason=Reason.MEMORY)
    if not diagnosis.known:
        stated = _stated_end(ending, output, host)
        if stated is not None:
            return stated
    if number in (*STOPPING, *TO_THE_LEADER) and not diagnosis.known:
        return replace(ending, reason=Reason.STOPPED, evidence="")
    if diagnosis.cause in MACHINE_CAUSES or _is_lost_gpu(diagnosis):
        return replace(ending, reason=Reason.MACHINE)
    return ending


def _stated_end(ending: Ending, output: str, host: HostEvidence) -> Ending | None:
    """Return the end that a scheduler or Ray states in the last lines; None: they state none."""
    last_lines = output.splitlines()[-STATED_LINES:]
    text = "\n".join(last_lines)
    for line in last_lines:
        if LOST_NODE.search(line):
            return replace(ending, reason=Reason.MACHINE, evidence=line.strip())
        if STATED_STOP.search(line) and FAILED_TASK not in text:
            return replace(ending, reason=Reason.STOPPED, evidence=line.strip())
    if KILLED_WORKER.search(text) and not CRASHED_WORKER.search(text):
        return _of_a_killed_process(ending, host)
    return None


def in_phase(ending: Ending, phase: str | None) -> Ending:
    """Return the ending with the phase that the trainer states, where its output shows none."""
    diagnosis = ending.diagnosis
    if not ending.is_out_of_memory or diagnosis is None or diagnosis.phase is not None:
        return ending
    stated = PHASE_BY_NAME.get(phase or "")
    return replace(ending, diagnosis=replace(diagnosis, phase=stated))


def _signal_of(end: ProcessEnd) -> int | None:
    """Return the signal that ended the command, also where a shell reports it as a code."""
    if end.signal is not None:
        return end.signal
    if end.exit is not None and SIGNALLED < end.exit < SIGNALLED + signal.NSIG:
        return end.exit - SIGNALLED
    return None


def _names_a_killed_process(diagnosis: Diagnosis) -> bool:
    """Return True if all that is known is that a process was killed."""
    return diagnosis.row == HOST_KILLED


def _of_a_killed_process(ending: Ending, host: HostEvidence) -> Ending:
    """A killed process is out of host memory only if the machine was; else others ended it."""
    diagnosis = ending.diagnosis
    if host.kills or host.was_short:
        evidence = "the kernel ended a process for want of host memory"
        if diagnosis is None or not diagnosis.is_memory:
            diagnosis = Diagnosis(
                known=True,
                is_memory=True,
                cause="host_ram",
                evidence=evidence,
            )
        return replace(
            ending,
            reason=Reason.MEMORY,
            cause=diagnosis.cause,
            evidence=evidence,
            diagnosis=diagnosis,
        )
    if diagnosis is not None and diagnosis.is_memory and not _names_a_killed_process(diagnosis):
        return replace(ending, reason=Reason.MEMORY)
    return replace(
        ending,
        reason=Reason.MACHINE,
        cause=None,
        evidence="a process was killed from outside, and the host had memory left",
    )


def _is_lost_gpu(diagnosis: Diagnosis) -> bool:
    text = diagnosis.evidence.lower()
    return diagnosis.cause == GPU_FAULT and not any(fault in text for fault in OF_THE_PROGRAM)
