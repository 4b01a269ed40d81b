"""Reasons of an end, from exit status, output and what the kernel counted."""

from __future__ import annotations

import signal

import pytest

from autotune.guard.attempt import ProcessEnd
from autotune.guard.ending import HostEvidence, Reason, ending_of

OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
    " capacity of 39.39 GiB of which 1.00 GiB is free."
)
TIMED_OUT = (
    "[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12,"
    " OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)
NOTHING = HostEvidence()
KILLS = HostEvidence(kills=1)


@pytest.mark.parametrize(
    ("end", "output", "host", "reason"),
    [
        (ProcessEnd(exit=0), OUT_OF_MEMORY, NOTHING, Reason.FINISHED),
        (ProcessEnd(exit=1), OUT_OF_MEMORY, NOTHING, Reason.MEMORY),
        (ProcessEnd(exit=1), "KeyError: 'advantages'", NOTHING, Reason.SCRIPT),
        (ProcessEnd(exit=1), "", NOTHING, Reason.SCRIPT),
        (ProcessEnd(signal=signal.SIGKILL), "", KILLS, Reason.MEMORY),
        (ProcessEnd(signal=signal.SIGKILL), "", HostEvidence(was_short=True), Reason.MEMORY),
        (ProcessEnd(signal=signal.SIGKILL), "", NOTHING, Reason.MACHINE),
        (ProcessEnd(exit=137), "", NOTHING, Reason.MACHINE),
        (ProcessEnd(exit=137), "", KILLS, Reason.MEMORY),
        (ProcessEnd(signal=signal.SIGTERM), "", NOTHING, Reason.STOPPED),
        (ProcessEnd(exit=143), "", NOTHING, Reason.STOPPED),
        # A scheduler warns before the end of a job: SIGUSR1 ends a trainer that does not handle it.
        (ProcessEnd(signal=signal.SIGUSR1), "", NOTHING, Reason.STOPPED),
        (ProcessEnd(signal=signal.SIGSEGV), "", NOTHING, Reason.SCRIPT),
        (
            ProcessEnd(exit=1),
            "torch.AcceleratorError: CUDA error: device-side assert triggered",
            NOTHING,
            Reason.SCRIPT,
        ),
        (
            ProcessEnd(exit=1),
            "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
            NOTHING,
            Reason.MACHINE,
        ),
        (
            ProcessEnd(signal=signal.SIGABRT),
            TIMED_OUT,
            NOTHING,
            Reason.MACHINE,
        ),
        (
            ProcessEnd(exit=1),
            "OSError: [Errno 28] No space left on device",
            NOTHING,
            Reason.SCRIPT,
        ),
    ],
)
def test_the_reason(
    end: ProcessEnd,
    output: str,
    host: HostEvidence,
    reason: Reason,
) -> None:
    assert ending_of(end, output, host, stop_requested=False).reason == reason


def test_after_a_stop_signal_nothing_is_tried_again() -> None:
    end = ProcessEnd(exit=1)
    assert ending_of(end, OUT_OF_MEMORY, KILLS, stop_requested=True).reason == Reason.STOPPED


@pytest.mark.parametrize(
    ("end", "code"), [(ProcessEnd(exit=7), 7), (ProcessEnd(signal=9), 137), (ProcessEnd(exit=0), 0)]
)
def test_exit_codes_are_those_of_a_shell(end: ProcessEnd, code: int) -> None:
    assert end.shell_code == code
