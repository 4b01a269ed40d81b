"""Processes that a log names: strangers on a GPU, and victim and cause where host memory ran
out.
"""

from __future__ import annotations

from autotune.diagnosis import diagnose

NVIDIA_SMI = """\
|    0   N/A  N/A           4242      C   /opt/envs/other/bin/python            61440MiB |
"""
OUT_OF_MEMORY = """\
Traceback (most recent call last):
  File "/srv/train.py", line 12, in <module>
    model = model.to("cuda")
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB \
of which 1.10 GiB is free. Process 4242 has 60.00 GiB memory in use. Including non-PyTorch memory, this process has \
18.05 GiB memory in use. \
Of the allocated memory 17.00 GiB is allocated by PyTorch, and 0.50 GiB is reserved by PyTorch but unallocated.
"""

KERNEL = """\
[Mon Nov 23 10:00:01 2026] python3 invoked oom-killer: gfp_mask=0x1100cca, order=0, oom_score_adj=0
[Mon Nov 23 10:00:01 2026] [  pid  ]   uid  tgid total_vm      rss pgtables_bytes swapents oom_score_adj name
[Mon Nov 23 10:00:01 2026] [   1200]     0  1200 20000000 15728640 120000000        0          -900 postgres
[Mon Nov 23 10:00:01 2026] [   4242]     0  4242  9000000  2621440  30000000        0             0 python3
[Mon Nov 23 10:00:01 2026] Out of memory: Killed process 4242 (python3) total-vm:36000000kB, anon-rss:10485760kB, file-rss:0kB
"""

RAY = """\
ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.4, ID: 5f) where the task was running was 120.31GB / 125.00GB (0.962), which exceeds the threshold.
The top 10 memory users are:
PID\tMEM(GB)\tCOMMAND
990\t88.20\tpython preprocess.py
4242\t11.30\tray::WorkerDict.update_actor
Refer to the documentation on how to address the out of memory issue.
"""


def test_strangers_on_a_gpu_are_named() -> None:
    found = diagnose(NVIDIA_SMI + OUT_OF_MEMORY)
    assert found.cause == "gpu_other_process"
    (remark,) = found.remarks
    assert "4242 (/opt/envs/other/bin/python, 60 GiB)" in remark and "ps -fp 4242" in remark


def test_the_victim_of_the_kernel_is_not_the_cause() -> None:
    found = diagnose(KERNEL)
    assert found.cause == "host_ram"
    assert found.remarks == (
        "The kernel ended process 4242 (python3), which held 10 GiB.",
        "The most host memory was held by process 1200 (postgres): 60 GiB.",
    )


def test_the_largest_user_that_ray_lists() -> None:
    found = diagnose(RAY)
    assert found.cause == "host_ram"
    assert found.remarks == (
        "The most host memory was held by process 990 (python preprocess.py): 88.2 GiB.",
    )


def test_a_victim_that_held_most_is_named_once() -> None:
    found = diagnose(KERNEL.replace("15728640", "1572"))
    assert found.remarks == ("The kernel ended process 4242 (python3), which held 10 GiB.",)
