"""Real TRL on a CPU under a limit: rows get longer, memory runs out at a later step. The guarded
run learns the same as one without a limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command import environment
from tests.light_environment import light_python_path
from tests.pipeline import make_project

ROOT = Path(__file__).resolve().parents[2]
ROOM_MIB = "120"
"""Less than the logits of 8 long rows, 353 MiB; more than those of one row, and of short ones."""

STEPS = 6
LONG_FROM_STEP = 4
PROMPTS_PER_STEP = 2

# The limit is set with the first reward: all that is loaded stays outside of it.
REWARDS = """
import os
import resource
from pathlib import Path


def distinct(completion_ids, **_):
    room = int(os.environ.get("ROOM_MIB", "0"))
    if room and resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY:
        status = Path("/proc/self/status").read_text().splitlines()
        mapped = next(int(line.split()[1]) for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (mapped * 1024 + room * 2**20, -1))
    return [float(sum(ids) % 97) / 97 for ids in completion_ids]
"""


def _project(folder: Path) -> Path:
    config = make_project(
        folder,
        reward_funcs=["rewards.distinct"],
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        max_steps=STEPS,
        save_steps=2,
        logging_steps=1,
        shuffle_dataset=False,
        learning_rate=1e-3,
        use_peft=False,
    )
    rows = []
    for row in range(2 * STEPS * PROMPTS_PER_STEP):
        is_long = row >= (LONG_FROM_STEP - 1) * PROMPTS_PER_STEP
        prompt_words = [
            ("one", "plus", "two")[(row + place) % 3] for place in range(80 if is_long else 4)
        ]
        rows.append(json.dumps({"prompt": " ".join(prompt_words)}) + "\n")
    (folder / "prompts" / "train.jsonl").write_text("".join(rows))
    (folder / "rewards.py").write_text(REWARDS)
    return config


def run_in(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=folder,
        env=environment(PYTHONPATH=light_python_path(ROOT), **variables),
        capture_output=True,
        text=True,
        timeout=1500,
    )


def _log(folder: Path) -> list[dict[str, Any]]:
    state = json.loads((folder / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"] == STEPS
    return list(state["log_history"])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_guarded_run_learns_what_an_uninterrupted_one_learns(tmp_path: Path) -> None:
    # 1. Without a limit, and with one under the guard.
    trl = str(Path(sys.executable).with_name("trl"))
    config = _project(tmp_path)
    free = tmp_path / "free.yaml"
    free.write_text(config.read_text().replace("output_dir: out", "output_dir: out-free"))
    done = run_in(tmp_path, trl, "grpo", "--config", "free.yaml")
    assert done.returncode == 0, done.stderr[-2000:]
    guard = (sys.executable, "-m", "autotune", "guard", "train.yaml", "--gpus", "cpu", "--no-proof")
    done = run_in(tmp_path, *guard, "--", trl, "grpo", "--config", "train.yaml", ROOM_MIB=ROOM_MIB)
    assert done.returncode == 0, done.stderr[-3000:]

    # 2. It ran out at the first step with long rows, and went on from the checkpoint before it.
    document = json.loads((tmp_path / "autotune-guard" / "guard.json").read_text())
    first, *_, last = document["attempts"]
    assert first["end"]["reason"] == "memory"
    assert first["last_step"] == LONG_FROM_STEP - 1
    assert last["from_step"] == 2
    changed = yaml.safe_load((tmp_path / last["config"]).read_text())
    micro, steps = changed["per_device_train_batch_size"], changed["gradient_accumulation_steps"]
    assert micro < 8 and micro * steps == 8 * 2
    assert changed["steps_per_generation"] == steps, "a generation has as many rows as before"

    # 3. The same samples, schedule and rewards; gradients up to rounding.
    free_log = _log(tmp_path / "out-free")
    guarded_log = _log(tmp_path / "out")
    assert len(free_log) == len(guarded_log) == STEPS
    for expected, step in zip(free_log, guarded_log, strict=True):
        for name in ("step", "epoch", "num_tokens", "learning_rate", "reward"):
            assert step[name] == expected[name], name
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert step["entropy"] == pytest.approx(expected["entropy"], rel=1e-5)
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-6)
