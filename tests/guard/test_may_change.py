"""--may-change: nothing that learns the same is left, so the allowed setting changes, and only that
one. With the advice alone, and with the real TRL on a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from autotune.diagnosis import diagnose
from autotune.guard.smaller import Evidence
from tests.guard.test_learned import OUT_OF_MEMORY, training_of
from tests.guard.test_same_learning import REWARDS, run_in
from tests.pipeline import make_project

pytestmark = pytest.mark.slow

GUARD = (sys.executable, "-m", "autotune", "guard", "train.yaml", "--gpus", "cpu", "--no-proof")


def _guarded(folder: Path, *options: str) -> tuple[int, str]:
    """Guard a run whose rewards are refused memory for completions of more than 300 tokens."""
    make_project(
        folder,
        reward_funcs=["rewards.distinct"],
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        num_generations=2,
        max_completion_length=512,
        max_steps=2,
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
    if max(map(len, completion_ids)) > 300:
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
    assert after["max_completion_length"] <= 300 < before["max_completion_length"]
    for name in ("num_generations", "learning_rate", "max_steps"):
        assert after.get(name) == before.get(name), name
    assert "learning changes, as --may-change allows" in messages
    assert document["steps"] == 2


@pytest.mark.long  # the advice without an allowed setting has a test below
def test_without_it_the_run_ends_with_code_3(tmp_path: Path) -> None:
    code, messages = _guarded(tmp_path, "--restarts", "9")
    assert code == 3, messages
    assert "nothing that learns the same is left to try" in messages


SMALLEST = """
model_name_or_path: Qwen/Qwen2.5-0.5B
reward_funcs: [accuracy_reward]
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
num_generations: 8
max_completion_length: 512
gradient_checkpointing: true
bf16: true
output_dir: out
"""


@pytest.mark.usefixtures("light_environment")
@pytest.mark.parametrize("allowed", [frozenset(), frozenset({"max_completion_length"})])
def test_of_the_smallest_batch_only_an_allowed_setting_is_offered(
    tmp_path: Path, allowed: frozenset[str]
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(SMALLEST)
    training = training_of(config)
    tried = {training.key}
    while True:
        evidence = Evidence(
            diagnosis=diagnose(OUT_OF_MEMORY),
            peak_bytes=None,
            refuted=frozenset(tried),
            may_change=allowed,
        )
        following = training.smaller(evidence)
        if following is None:
            break
        training, choice = following
        assert training.key not in tried
        tried.add(training.key)
        if choice.learning:
            assert choice.change.keys() <= allowed
            assert training.candidate.settings["max_completion_length"] == 256
            return
    assert not allowed, "the allowed change was not offered"
