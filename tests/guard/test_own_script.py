"""A training script of the user's own with a trainer of TRL: flags of its command restart it. Real
TRL on a CPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autotune.guard.command_settings import settings_of_flags, with_flags
from tests.guard.test_same_learning import run_in
from tests.pipeline import make_project

STEPS = 4
SAVED_STEP = 2

SCRIPT = """
from pathlib import Path

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser

REFUSED = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of"
    " which 1.00 GiB is free."
)


def distinct(completion_ids, trainer_state, **_):
    failed = Path("failed")
    if trainer_state.global_step == 2 and not failed.exists():
        failed.touch()
        raise RuntimeError(REFUSED)
    return [float(sum(ids) % 97) / 97 for ids in completion_ids]


if __name__ == "__main__":
    (args,) = PARSED
    rows = load_dataset("prompts", split="train")
    trainer = GRPOTrainer("model", reward_funcs=distinct, args=args, train_dataset=rows)
    trainer.train(RESUMED)
"""
PARSED = "TrlParser(GRPOConfig).parse_args_and_config()"
RESUMED = "resume_from_checkpoint=args.resume_from_checkpoint"
FIXED = (
    'GRPOConfig("out", per_device_train_batch_size=8, num_generations=8, use_cpu=True, bf16=False,'
    " max_completion_length=8, max_steps=4, save_steps=2, report_to='none'),"
)
FLAGS = {
    "output_dir": "out",
    "per_device_train_batch_size": "8",
    "num_generations": "8",
    "max_completion_length": "8",
    "max_steps": str(STEPS),
    "save_steps": str(SAVED_STEP),
    "logging_steps": "1",
    "use_cpu": "true",
    "bf16": "false",
    "report_to": "none",
}


def _guarded(
    folder: Path,
    parsed: str,
    resumed: str,
    flags: dict[str, str],
) -> tuple[int, str]:
    """Guard `python train.py FLAGS`; return its exit code and what was said."""
    make_project(folder)
    (folder / "train.yaml").unlink()
    script = SCRIPT.replace("PARSED", parsed).replace("RESUMED", resumed)
    (folder / "train.py").write_text(script)
    arguments = []
    for name, value in flags.items():
        arguments += [f"--{name}", value]
    guard = (sys.executable, "-m", "autotune", "guard", "--gpus", "cpu")
    done = run_in(folder, *guard, "--", sys.executable, "train.py", *arguments)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("resumed", "from_step"),
    [(RESUMED, SAVED_STEP), pytest.param("", None, marks=pytest.mark.long)],
    ids=["resumed", "from the start"],
)
def test_flags_make_it_smaller(
    tmp_path: Path,
    resumed: str,
    from_step: int | None,
) -> None:
    code, messages = _guarded(tmp_path, PARSED, resumed, FLAGS)
    assert code == 0, messages[-3000:]
    assert ("a restart begins at step 0" in messages) == (from_step is None)
    first, second = json.loads((tmp_path / "autotune-guard" / "guard.json").read_text())["attempts"]
    assert first["end"]["reason"] == "memory"
    assert second["from_step"] == from_step and second["last_step"] == STEPS
    settings = settings_of_flags(second["command"])
    micro, accumulation = (
        settings["per_device_train_batch_size"],
        settings["gradient_accumulation_steps"],
    )
    assert isinstance(micro, int) and micro < 8 and micro * int(str(accumulation)) == 8
    assert settings["output_dir"] == "out" and settings["max_steps"] == STEPS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_without_flags_ends_with_what_can_be_done(tmp_path: Path) -> None:
    code, messages = _guarded(tmp_path, FIXED, "", {})
    assert code == 3, messages[-3000:]
    assert "train.py takes no flags of TRL" in messages
    assert "nothing that learns the same is left to try" in messages


def test_flags_are_changed_in_place_or_added() -> None:
    command = ["python", "train.py", "--per-device-train-batch-size", "8", "--bf16=true"]
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": False}
    assert with_flags(command, settings) == [
        *("python", "train.py", "--per-device-train-batch-size", "4", "--bf16=false"),
        "--gradient_accumulation_steps=2",
    ]
