"""Other processes on the failing GPU: foreign ones, or other roles of the same job."""

from __future__ import annotations

import pytest

from autotune.diagnosis import diagnose
from tests.diagnosis.around import prefixed, sample

LISTED = (
    "|    0   N/A  N/A      {pid}      C   /home/somebody/bin/python              {held}MiB |\n"
)
RESERVATION = "ValueError: " + sample("vllm_reservation").partition(": ")[2]
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.77 GiB. GPU 0 has a total"
    " capacity of 79.11 GiB of which 1.32 GiB is free. Process 40120 has 16.77 GiB memory in use."
    " Including non-PyTorch memory, this process has 61.01 GiB memory in use. Of the allocated"
    " memory 57.88 GiB is allocated by PyTorch, and 2.44 GiB is reserved by PyTorch but"
    " unallocated.\n"
)
STEP = "(TaskRunner pid=77) step:1 - actor/pg_loss:-0.011\n"


def failing(place: str, package: str) -> str:
    frames = (
        f'Traceback (most recent call last):\n  File "/job/{package}/workers/actor.py", line 9, in'
        f" {place}\n    x = y()\n"
    )
    return frames + OUT_OF_MEMORY


def test_actors_that_share_a_gpu_are_no_strangers_to_each_other() -> None:
    diagnosis = diagnose(STEP + failing("update_actor", "verl"))
    assert diagnosis.cause == "activations" and diagnosis.numbers["others_bytes"] > 0
    # While it loads, a job holds little of the GPU yet; and who trains in one process has no other
    # roles.
    assert diagnose(STEP + failing("load_model", "verl")).cause == "gpu_other_process"
    assert diagnose(STEP + failing("update_actor", "mytrainer")).cause == "gpu_other_process"
    assert diagnose(failing("update_actor", "verl")).cause == "gpu_other_process"


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        (LISTED.format(pid=5120, held=130_000), "gpu_other_process"),
        ("", "engine_startup"),
        # A display, less than a GiB; its own, of which the number stands in the log; and what began
        # after the run did.
        (LISTED.format(pid=5120, held=400), "engine_startup"),
        (LISTED.format(pid=812, held=130_000), "engine_startup"),
        (
            "INFO 11-20 18:13:58 [core.py:58] Initializing\n"
            + LISTED.format(pid=5120, held=130_000),
            "engine_startup",
        ),
    ],
)
def test_what_was_listed_before_the_run_began_is_not_the_engines(before: str, cause: str) -> None:
    diagnosis = diagnose(before + prefixed("(EngineCore_DP0 pid=812) ", RESERVATION))
    assert (diagnosis.cause, diagnosis.row) == (cause, "vllm_reservation")


ON_GPU_0 = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 260.00 MiB. GPU {gpu} has a"
    " total capacity of 79.15 GiB of which 30.19 MiB is free. Process 3185 has 26.2 GiB memory in"
    " use. Process 3186 has 26.4 GiB memory in use. Process 3187 has {third_gib} GiB memory in"
    " use. Of the allocated memory 26.00 GiB is allocated by PyTorch, and 4.53 MiB is reserved by"
    " PyTorch but unallocated.\n"
)
OWN_GPU = {"torch.cuda.set_device": "LOCAL_RANK"}


def test_ranks_that_all_compute_on_the_first_gpu() -> None:
    message = ON_GPU_0.format(gpu=0, third_gib="26.3")
    diagnosis = diagnose(prefixed("[rank2]: ", message))
    (advice,) = diagnosis.remedies
    assert advice.change == OWN_GPU
    assert diagnosis.cause == "gpu_other_process"
    (remark,) = diagnosis.remarks
    assert "Rank 2 computes on GPU 0" in remark and "the ranks of one job" in remark


@pytest.mark.parametrize(
    ("rank", "gpu", "third_gib"),
    [
        ("0", 0, "26.3"),
        ("2", 2, "26.3"),
        ("2", 0, "9.1"),
    ],
)
def test_other_processes_may_be_strangers(
    rank: str,
    gpu: int,
    third_gib: str,
) -> None:
    """Rank 0 belongs there, another GPU is its own, and ranks hold as much as each other."""
    message = ON_GPU_0.format(gpu=gpu, third_gib=third_gib)
    diagnosis = diagnose(prefixed(f"[rank{rank}]: ", message))
    for advice in diagnosis.remedies:
        assert advice.change != OWN_GPU
