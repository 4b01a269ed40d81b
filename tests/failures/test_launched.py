"""Exit of a launched program."""

from __future__ import annotations

import pytest

from autotune.core.measurement import Outcome
from autotune.failures.classify import classify_launched
from autotune.failures.findings import ProcessExit

TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    {code}
  File "/env/torch/{file}", line 600, in {function}
    work()
{error}
"""
NO_MEMORY = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. "
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 536870912 bytes."
)


def printed(
    error: str = NO_MEMORY,
    file: str = "nn/modules/linear.py",
    function: str = "forward",
    code: str = "loss.backward()",
) -> str:
    return "step 1\n" + TRACEBACK.format(
        code=code,
        file=file,
        function=function,
        error=error,
    )


def test_the_phase_is_what_its_traceback_tells() -> None:
    ended = ProcessExit(exit=1, printed=printed(file="autograd/__init__.py", function="backward"))
    finding = classify_launched(ended, "")
    assert finding.outcome is Outcome.OOM_BACKWARD and finding.numbers["asked_bytes"] == 536870912


def test_what_is_computed_again_while_gradients_are_is_the_backward_pass() -> None:
    assert (
        classify_launched(ProcessExit(exit=1, printed=printed()), "").outcome
        is Outcome.OOM_BACKWARD
    )
    output = printed(code="hidden = model(batch)")
    assert classify_launched(ProcessExit(exit=1, printed=output), "").outcome is Outcome.OOM_FORWARD


@pytest.mark.parametrize(
    "ending",
    [
        ProcessExit(
            exit=1,
            printed=printed(
                file="_tensor.py",
                function="clone",
                code="kept.append(state.clone())",
            ),
        ),
        ProcessExit(signal=9, out_of_memory="limit"),
        ProcessExit(
            exit=1,
            out_of_memory="limit",
            printed="Signal 9 (SIGKILL) received by PID 7",
        ),
        ProcessExit(
            exit=1,
            device="cuda",
            printed="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
    ],
)
def test_an_unknown_phase_is_not_called_a_load(ending: ProcessExit) -> None:
    finding = classify_launched(ending, "")
    assert finding.outcome is Outcome.OOM_UNKNOWN and finding.phase is None
    assert finding.outcome.is_out_of_memory


def test_what_is_not_about_memory_is_named_where_the_table_knows_it() -> None:
    error = "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn"
    assert (
        classify_launched(ProcessExit(exit=1, printed=printed(error)), "").outcome
        is Outcome.ILLEGAL
    )
    unknown = classify_launched(
        ProcessExit(exit=1, printed=printed("ValueError: no such corpus")), ""
    )
    assert unknown.outcome is Outcome.CRASH and unknown.evidence == "ValueError: no such corpus"


def test_without_an_exception_its_last_words_are_the_evidence() -> None:
    finding = classify_launched(ProcessExit(exit=2, printed="usage: train.py"), "usage: train.py")
    assert (
        finding.outcome is Outcome.CRASH
        and "exit code 2" in finding.evidence
        and "usage: train.py" in finding.evidence
    )


def test_the_machines_memory_is_the_machines() -> None:
    assert (
        classify_launched(ProcessExit(signal=9, out_of_memory="machine"), "").outcome
        is Outcome.OOM_HOST
    )
