"""--may-change with the real TRL on a CPU: nothing that learns the same is left, so the allowed
setting changes, and only that one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.guard.test_same_learning import REWARDS, ROOT, run_in
from tests.pipeline import make_project

pytestmark = pytest.mark.slow

GUARD = (sys.executable, "-m", "autotune", "guard", "train.yaml", "--gpus", "cpu", "--no-proof")


def _guarded(folder: Path, *options: str) -> tuple[int, str]:
    """Guard a run whose rewards are refused memory for completions longer than 8 tokens."""
    make_project(
        folder,
        reward_funcs=["rewards.distinct"],
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        num_generations=2,
        max_completion_length=32,
        max_steps=4,
        save_steps=1,
        logging_steps=1,
        use_peft=False,
        gradient_checkpointing=True,
    )
    (folder / "rewards.py").write_text(REFUSING)
    trl = str(Path(sys.executable).with_name("trl"))
    done = run_in(folder, *GUARD, *options, "--", trl, "grpo", "--config", "train.yaml")
    return done.returncode, done.stderr


# A GPU's message, so that nothing but the lengths decides.
REFUSING = (
    REWARDS
    + """

unlimited = distinct


def distinct(completion_ids, **more):
    if max(map(len, completion_ids)) > 8:
        raise RuntimeError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39"
            " GiB of which 1.00 GiB is free."
        )
    return unlimited(completion_ids, **more)
"""
)


def test_an_allowed_setting_changes_and_no_other(tmp_path: Path) -> None:
    options = ("--restarts", "9", "--may-change", "max_completion_length")
    code, messages = _guarded(tmp_path, *options)
    assert code == 0, messages
    document = json.loads((tmp_path / "autotune-guard" / "guard.json").read_text())
    before = yaml.safe_load((tmp_path / "train.yaml").read_text())
    after = yaml.safe_load((tmp_path / document["attempts"][-1]["config"]).read_text())
    assert after["max_completion_length"] <= 8 < before["max_completion_length"]
    for name in ("num_generations", "learning_rate", "max_steps"):
        assert after.get(name) == before.get(name), name
    assert "learning changes, as --may-change allows" in messages
    assert document["steps"] == 4


def test_without_it_the_run_ends_with_code_3(tmp_path: Path) -> None:
    code, messages = _guarded(tmp_path, "--restarts", "9")
    assert code == 3, messages
    assert "nothing that learns the same is left to try" in messages
    assert str(ROOT) not in messages
