"""Real TRL on a CPU by the launchers that users have: the last rank runs out of memory, all end,
and the run goes on from its checkpoint. And the SLURM example, requeued.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.probe.spawn import MARK_VARIABLE, marked
from tests.cli.command import environment
from tests.guard.test_same_learning import REWARDS, ROOT, run_in
from tests.pipeline import make_project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BIN = Path(sys.executable).parent
EXAMPLE = ROOT / "examples" / "guard" / "train.sbatch"
STEPS = 4
SAVED_STEP = 2

# On the last rank alone and once, with a GPU's message.
REFUSED_ONCE = (
    REWARDS
    + """

unlimited = distinct


def distinct(completion_ids, trainer_state, **more):
    refused = Path("refused")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    is_last_rank = int(os.environ.get("RANK", "0")) == ranks - 1
    if is_last_rank and trainer_state.global_step == 2 and not refused.exists():
        refused.touch()
        raise RuntimeError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 39.39"
            " GiB of which 1.00 GiB is free."
        )
    return unlimited(completion_ids, **more)
"""
)


def _project(folder: Path, rewards: str) -> None:
    make_project(
        folder,
        reward_funcs=["rewards.distinct"],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        num_generations=4,
        max_completion_length=8,
        max_steps=STEPS,
        save_steps=SAVED_STEP,
        logging_steps=1,
        use_peft=False,
    )
    (folder / "rewards.py").write_text(rewards)


def _document(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "guard.json").read_text())
    return document


@pytest.mark.parametrize(
    "devices, launcher",
    [
        ("cpu", (BIN / "accelerate", "launch", "--cpu", "--num_processes", "1")),
        ("2xcpu", (BIN / "torchrun", "--nproc_per_node", "2")),
    ],
    ids=["accelerate", "torchrun"],
)
def test_a_rank_that_runs_out_of_memory_is_restarted_with_all(
    tmp_path: Path, devices: str, launcher: tuple[object, ...]
) -> None:
    _project(tmp_path, REFUSED_ONCE)
    guard = (sys.executable, "-m", "autotune", "guard", "train.yaml", "--gpus", devices)
    command = (*map(str, launcher), "-m", "trl.scripts.grpo", "--config", "train.yaml")
    done = run_in(
        tmp_path, *guard, "--no-proof", "--", *command, **{MARK_VARIABLE: "guard-launchers"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = _document(tmp_path / "autotune-guard")["attempts"]
    assert first["end"]["reason"] == "memory" and first["end"]["exit"] == 1
    assert second["from_step"] == SAVED_STEP and second["last_step"] == STEPS
    before = yaml.safe_load((tmp_path / "train.yaml").read_text())
    after = yaml.safe_load((tmp_path / second["config"]).read_text())
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    products = []
    for settings in (before, after):
        products.append(settings[sizes[0]] * settings[sizes[1]])
    assert products == [4, 4] and after[sizes[0]] < 4
    assert (tmp_path / "out" / f"checkpoint-{STEPS}").is_dir()
    assert not marked("guard-launchers"), "a rank is left"


def _submit(folder: Path) -> subprocess.Popen[str]:
    """Start the example as SLURM does: with its variables, in the folder of the submission."""
    variables = {
        "SLURM_JOB_ID": "77",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_NUM_NODES": "1",
        "GUARD": "--gpus cpu --no-proof",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        MARK_VARIABLE: "guard-slurm",
    }
    return subprocess.Popen(
        ["bash", str(EXAMPLE)],
        cwd="/",
        env=environment(**variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_requeued_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    # 1. The node is drained after the first checkpoint: SIGTERM to the job.
    _project(tmp_path, REWARDS)
    job = _submit(tmp_path)
    saved = tmp_path / "out" / f"checkpoint-{SAVED_STEP}" / "trainer_state.json"
    deadline = time.monotonic() + 300
    while not saved.exists() and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, messages = job.communicate(timeout=120)
    assert job.returncode == 128 + signal.SIGTERM, messages[-3000:]
    results = tmp_path / "runs" / "77" / "guard"
    assert _document(results)["status"] == "stopped"
    assert not marked("guard-slurm")

    # 2. The scheduler runs the same file again.
    job = _submit(tmp_path)
    _, messages = job.communicate(timeout=400)
    assert job.returncode == 0, messages[-3000:]
    document = _document(results)
    assert document["status"] == "finished" and document["steps"] == STEPS
    assert len(document["earlier_attempts"]) == 1
    (attempt,) = document["attempts"]
    assert attempt["from_step"] == SAVED_STEP
    state = json.loads(
        (tmp_path / "out" / f"checkpoint-{STEPS}" / "trainer_state.json").read_text()
    )
    steps = [row["step"] for row in state["log_history"] if "reward" in row]
    assert steps == list(range(1, STEPS + 1)), "each step once"
