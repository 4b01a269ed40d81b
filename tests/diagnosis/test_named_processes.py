"""Processes that a log names: strangers on a GPU, and victim and cause where host memory ran
out.
"""

from __future__ import annotations

from pathlib import Path

from autotune.diagnosis import diagnose

NVIDIA_SMI = """\
|    0   N/A  N/A           4242      C   /opt/envs/other/bin/python            61440MiB |
"""
OUT_OF_MEMORY = (Path(__file__).parent / "around/out_of_memory.log").read_text()

KERNEL = (Path(__file__).parent / "around/kernel.log").read_text()

RAY = (Path(__file__).parent / "around/ray.log").read_text()


def test_strangers_on_a_gpu_are_named() -> None:
    diagnosis = diagnose(NVIDIA_SMI + OUT_OF_MEMORY)
    assert diagnosis.cause == "gpu_other_process"
    (remark,) = diagnosis.remarks
    assert "4242 (/opt/envs/other/bin/python, 60 GiB)" in remark and "ps -fp 4242" in remark


def test_the_victim_of_the_kernel_is_not_the_cause() -> None:
    diagnosis = diagnose(KERNEL)
    assert diagnosis.cause == "host_ram"
    assert diagnosis.remarks == (
        "The kernel ended process 4242 (python3), which held 10 GiB.",
        "The most host memory was held by process 1200 (postgres): 60 GiB.",
    )


def test_the_largest_user_that_ray_lists() -> None:
    diagnosis = diagnose(RAY)
    assert diagnosis.cause == "host_ram"
    assert diagnosis.remarks == (
        "The most host memory was held by process 990 (python preprocess.py): 88.2 GiB.",
    )


def test_a_victim_that_held_most_is_named_once() -> None:
    diagnosis = diagnose(KERNEL.replace("15728640", "1572"))
    assert diagnosis.remarks == ("The kernel ended process 4242 (python3), which held 10 GiB.",)
