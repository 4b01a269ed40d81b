"""A GRPO run of a few steps by the real TRL, saved after every second one, for guard tests."""

from __future__ import annotations

import json
from pathlib import Path

from tests.pipeline import make_project

ROWS_OF_A_STEP = 4
SAVED_STEP = 2


def make_short_run(
    folder: Path,
    steps: int,
    rewards: str,
) -> None:
    """Write the run's project. `rewards`: module with the reward function `distinct`."""
    make_project(
        folder,
        reward_funcs=["rewards.distinct"],
        per_device_train_batch_size=ROWS_OF_A_STEP,
        gradient_accumulation_steps=1,
        num_generations=ROWS_OF_A_STEP,
        max_completion_length=8,
        max_steps=steps,
        save_steps=SAVED_STEP,
        logging_steps=1,
        use_peft=False,
    )
    (folder / "rewards.py").write_text(rewards)


def assert_each_step_once(folder: Path, steps: int) -> None:
    """Assert that the last checkpoint has seen every step, in all attempts together."""
    state_file = folder / "out" / f"checkpoint-{steps}" / "trainer_state.json"
    history = json.loads(state_file.read_text())["log_history"]
    logged_steps = [row["step"] for row in history if "reward" in row]
    assert logged_steps == list(range(1, steps + 1))
