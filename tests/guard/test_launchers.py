"""Real TRL on two CPU ranks by the launchers that users have: one rank fails, all of them end, and
the run goes on from its checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.probe.spawn import MARK_VARIABLE, marked
from tests.guard.short_grpo import (
    ROWS_OF_A_STEP,
    SAVED_STEP,
    assert_each_step_once,
    make_short_run,
)
from tests.guard.test_same_learning import REWARDS, run_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BIN = Path(sys.executable).parent
LAUNCHERS = {
    "accelerate": (str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2"),
    "torchrun": (str(BIN / "torchrun"), "--nproc_per_node", "2"),
}
STEPS = 4
SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")

# docs/guard.md has these lines: torch refuses the name `cpu:0`, which transformers gives it there.
RESTORE_ON_RANKS = """
import torch


def on_cpu(storage, location):
    return storage if location == "cpu:0" else None


torch.serialization.register_package(100, lambda storage: None, on_cpu)
"""

# On the last rank alone and once.
FAILS_ONCE = """

unlimited = distinct
REFUSED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 39.39 GiB of"
    " which 1.00 GiB is free."
)


def distinct(completion_ids, trainer_state, **more):
    failed = Path("failed")
    is_last_rank = os.environ["RANK"] == "1" and os.environ["WORLD_SIZE"] == "2"
    if is_last_rank and trainer_state.global_step == 2 and not failed.exists():
        failed.touch()
        FAIL
    return unlimited(completion_ids, **more)
"""
RUNS_OUT = "raise RuntimeError(REFUSED)"
IS_KILLED = "os.kill(os.getpid(), 9)"


def _project(folder: Path, fault: str) -> None:
    rewards = RESTORE_ON_RANKS + REWARDS + FAILS_ONCE.replace("FAIL\n", f"{fault}\n")
    make_short_run(folder, STEPS, rewards)


def _guarded(folder: Path, launcher: str) -> subprocess.CompletedProcess[str]:
    guard = (sys.executable, "-m", "autotune", "guard", "train.yaml", "--gpus", "2xcpu")
    command = (*LAUNCHERS[launcher], "-m", "trl.scripts.grpo", "--config", "train.yaml")
    return run_in(folder, *guard, "--no-proof", "--", *command, **{MARK_VARIABLE: str(folder)})


def _attempts(folder: Path) -> list[dict[str, Any]]:
    document = json.loads((folder / "autotune-guard" / "guard.json").read_text())
    assert document["status"] == "finished"
    attempts: list[dict[str, Any]] = document["attempts"]
    return attempts


# The other test starts torchrun in every run.
@pytest.mark.long
@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_a_rank_that_runs_out_of_memory_is_restarted_smaller(tmp_path: Path, launcher: str) -> None:
    _project(tmp_path, RUNS_OUT)
    done = _guarded(tmp_path, launcher)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = _attempts(tmp_path)
    assert first["end"]["reason"] == "memory" and first["end"]["exit"] == 1
    assert second["from_step"] == SAVED_STEP and second["last_step"] == STEPS

    # The global batch of both ranks stays, with fewer rows at once.
    changed = yaml.safe_load((tmp_path / second["config"]).read_text())
    micro, accumulation = (changed[name] for name in SIZES)
    assert micro < ROWS_OF_A_STEP and micro * accumulation == ROWS_OF_A_STEP
    assert_each_step_once(tmp_path, STEPS)
    assert not marked(str(tmp_path)), "a rank is left"


def test_a_rank_that_is_killed_is_restarted_unchanged(tmp_path: Path) -> None:
    _project(tmp_path, IS_KILLED)
    done = _guarded(tmp_path, "torchrun")
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = _attempts(tmp_path)
    assert first["end"]["reason"] == "machine" and first["change"] is None
    assert second["from_step"] == SAVED_STEP and second["last_step"] == STEPS
    before = yaml.safe_load((tmp_path / "train.yaml").read_text())
    after = yaml.safe_load((tmp_path / second["config"]).read_text())
    del after["resume_from_checkpoint"]
    assert after == before
    assert_each_step_once(tmp_path, STEPS)
    assert not marked(str(tmp_path)), "a rank is left"
