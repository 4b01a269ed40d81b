"""Logs of two real ranks under torchrun, of which the second fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.diagnosis import diagnose

SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
numbers = torch.ones(4)
dist.all_reduce(numbers)
print({"loss": 0.1, "grad_norm": 1.0})
if dist.get_rank() == 1:
    FAILURE
dist.all_reduce(numbers)
print({"train_runtime": 1.0})
dist.destroy_process_group()
"""

WAYS = {
    "out of memory": ("torch.empty(10**15)", True, "host_ram"),
    "killed": ("os.kill(os.getpid(), 9)", True, "host_ram"),
    "not a number": ("torch.multinomial(torch.tensor([float('nan')] * 3), 1)", False, "numeric"),
    "a missing file": ("open('/proc/1/cannot', 'w')", None, None),
    "no module": ("import flash_attn_of_nobody", False, "version"),
    "an unknown error": ("torch.ones(3) @ torch.ones(4)", None, None),
    "a crash of its own": ("os.kill(os.getpid(), 11)", None, None),
}


def log_of(failure: str, folder: Path) -> str:
    (folder / "train.py").write_text(SCRIPT.replace("FAILURE", failure))
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "train.py",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        run,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    return done.stdout.decode(errors="replace")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_the_second_rank_is_named_with_its_cause(way: str, tmp_path: Path) -> None:
    failure, is_memory, cause = WAYS[way]
    diagnosis = diagnose(log_of(failure, tmp_path))
    assert (diagnosis.rank, diagnosis.is_memory, diagnosis.cause) == (1, is_memory, cause), (
        diagnosis
    )
    assert diagnosis.known == (cause is not None)


@pytest.mark.slow
def test_two_ranks_that_finish(tmp_path: Path) -> None:
    assert diagnose(log_of("pass", tmp_path)).cause == "none"
