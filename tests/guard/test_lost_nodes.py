"""A node that is lost, and what a scheduler or Ray states at the end of the output: messages as
SLURM, Ray and torchrun print them.
"""

from __future__ import annotations

import signal

import pytest

from autotune.guard.attempt import ProcessEnd
from autotune.guard.ending import HostEvidence, Reason, ending_of

NODE_FAILURE = """\
srun: error: Node failure on node07
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
slurmstepd: error: *** STEP 4711.0 ON node06 CANCELLED AT 2026-03-02T03:12:44 DUE TO NODE FAILURE, \
SEE SLURMCTLD LOG FOR DETAILS ***
srun: error: node06: task 0: Terminated
"""
CANCELLED = "slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2026-03-02T03:12:44 ***"
PREEMPTED = CANCELLED.removesuffix("***") + "DUE TO PREEMPTION ***"
TIME_IS_UP = CANCELLED.removesuffix("***") + "DUE TO TIME LIMIT ***"
OTHER_TASK_FAILED = f"srun: error: n2: task 1: Exited with exit code 1\n{CANCELLED}"
TORCHRUN_STOPPED = (
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15"
)

RAY_ACTOR = """\
Traceback (most recent call last):
  File "/site-packages/ray/_private/worker.py", line 2822, in get
    values, debugger_breakpoint = worker.get_objects(object_refs, timeout=timeout)
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
	class_name: WorkerDict
"""
RAY_NODE = f"{RAY_ACTOR}The actor died because its node has died. Node Id: 1b2c"
RAY_WORKER = (
    f"{RAY_ACTOR}The actor is dead because its worker process has died. Worker exit type:"
    " SYSTEM_ERROR Worker exit detail: Worker unexpectedly exits with a connection error code 2."
    " End of file. There are some potential root causes. (1) The process is killed by SIGKILL by"
    " OOM killer due to high memory usage. (2) ray stop --force is called. (3) The worker is"
    " crashed unexpectedly due to SIGSEGV or other unexpected errors."
)
RAY_CRASH = f"(WorkerDict pid=7) *** SIGSEGV received at time=1764209862 on cpu 3 ***\n{RAY_WORKER}"

GLOO_TIMEOUT = (
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out"
    " waiting 1800000ms for recv operation to complete"
)
NCCL_PEER = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or"
    " there was a network error, NCCL version 2.27.3"
)

NOTHING = HostEvidence()
KILLS = HostEvidence(kills=1)


@pytest.mark.parametrize(
    ("output", "host", "reason"),
    [
        (NODE_FAILURE, NOTHING, Reason.MACHINE),
        (PREEMPTED, NOTHING, Reason.MACHINE),
        (TIME_IS_UP, NOTHING, Reason.STOPPED),
        (CANCELLED, NOTHING, Reason.STOPPED),
        (OTHER_TASK_FAILED, NOTHING, Reason.SCRIPT),
        (TORCHRUN_STOPPED, NOTHING, Reason.STOPPED),
        (RAY_NODE, NOTHING, Reason.MACHINE),
        (RAY_WORKER, NOTHING, Reason.MACHINE),
        (RAY_WORKER, KILLS, Reason.MEMORY),
        (RAY_CRASH, NOTHING, Reason.SCRIPT),
    ],
)
def test_what_is_stated_at_the_end_decides(
    output: str,
    host: HostEvidence,
    reason: Reason,
) -> None:
    assert ending_of(ProcessEnd(exit=1), output, host, stop_requested=False).reason == reason


def test_srun_ends_by_a_signal_after_a_lost_node() -> None:
    end = ProcessEnd(exit=128 + signal.SIGTERM)
    ending = ending_of(end, NODE_FAILURE, NOTHING, stop_requested=False)
    assert ending.reason == Reason.MACHINE
    assert ending.evidence == "srun: error: Node failure on node07"


def test_a_node_that_was_lost_long_before_is_no_reason() -> None:
    output = NODE_FAILURE + "step\n" * 100 + "KeyError: 'advantages'"
    ending = ending_of(ProcessEnd(exit=1), output, NOTHING, stop_requested=False)
    assert ending.reason == Reason.SCRIPT


@pytest.mark.parametrize(
    "output",
    [
        "Unable to determine the device handle for GPU0000:3F:00.0: GPU is lost.",
        "torch.AcceleratorError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "RuntimeError: CUDA error: unspecified launch failure",
        "pynvml.NVMLError_GpuIsLost: GPU is lost",
        GLOO_TIMEOUT,
        NCCL_PEER,
    ],
)
def test_a_lost_gpu_or_peer_is_a_fault_of_the_machine(output: str) -> None:
    ending = ending_of(ProcessEnd(exit=1), output, NOTHING, stop_requested=False)
    assert ending.reason == Reason.MACHINE
