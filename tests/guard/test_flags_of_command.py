"""Flags behind CONFIG win over it, as they do in TRL: the guard reads and changes them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from autotune.guard.command_reading import known_training, method_of, overriding_flags
from autotune.guard.command_settings import settings_of_flags, with_settings
from autotune.request.flags import Flags
from tests.cli.command import autotune

CONFIG = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B",
    "reward_funcs": ["accuracy_reward"],
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 8,
    "output_dir": "of-the-file",
}
# Writes its arguments; the first start saves step 3 and runs out of memory.
TRAINING = """
echo "$*" >> starts
if [ ! -d of-the-flag ]; then
  mkdir -p of-the-flag/checkpoint-3
  for file in trainer_state.json optimizer.pt scheduler.pt rng_state.pth model.safetensors; do
    echo '{}' > of-the-flag/checkpoint-3/$file
  done
  rm of-the-flag/checkpoint-3/model.safetensors
  python -c "
import struct
header = b'{}'
open('of-the-flag/checkpoint-3/model.safetensors', 'wb').write(struct.pack('<Q', 2) + header)"
  echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB." >&2
  exit 1
fi
"""


@pytest.mark.slow
@pytest.mark.usefixtures("light_environment")
def test_a_flag_wins_over_the_file_and_follows_the_change(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "trl.sh").write_text(TRAINING)
    flags = ("--per_device_train_batch_size", "16", "--output_dir=of-the-flag")
    guard = ("guard", "train.yaml", "--gpus", "cpu", "--no-proof", "--")
    command = ("bash", "trl.sh", "grpo", "--config", "train.yaml", *flags)
    done = autotune(*guard, *command, cwd=tmp_path, timeout=120)
    assert done.code == 0, done.err

    # 1. 16 rows at a time ran out, not the 8 of the file; 16 x 2 are a step.
    first, second = json.loads((tmp_path / "autotune-guard" / "guard.json").read_text())["attempts"]
    assert "(was 16)" in done.err
    micro = first["change"]["per_device_train_batch_size"]
    assert micro < 16 and micro * first["change"]["gradient_accumulation_steps"] == 32

    # 2. The restart has them in flag and file, and goes on from the folder of the flag.
    _, restart = (tmp_path / "starts").read_text().splitlines()
    assert f"--per_device_train_batch_size {micro} " in restart
    changed = yaml.safe_load((tmp_path / second["config"]).read_text())
    assert changed["per_device_train_batch_size"] == micro
    assert changed["gradient_accumulation_steps"] == 32 // micro
    assert second["from_step"] == 3
    assert changed["resume_from_checkpoint"].endswith("of-the-flag/checkpoint-3")


@pytest.mark.parametrize(
    "flags, micro, steps",
    [
        ((), 8, 2),
        (("--per_device_train_batch_size", "16"), 16, 2),
        (("--gradient_accumulation_steps=4",), 8, 4),
        (("--no_gradient_checkpointing", "--gradient_accumulation_steps=4"), 8, 4),
        (("--beta", "0.1", "--gradient-accumulation-steps", "4"), 8, 4),
    ],
)
def test_the_batch_is_that_of_file_and_flags(
    tmp_path: Path,
    flags: tuple[str, ...],
    micro: int,
    steps: int,
) -> None:
    config = tmp_path / "train.yaml"
    config.write_text(yaml.safe_dump(CONFIG))
    command = ("trl", "grpo", "--config", str(config), *flags)
    training = known_training(str(config), command, Flags(config=None, gpus="cpu"), tmp_path)
    assert training is not None
    settings = training.candidate.settings
    assert settings["per_device_train_batch_size"] == micro
    assert settings["gradient_accumulation_steps"] == steps
    assert settings.get("beta", 0.0) == (0.1 if "--beta" in flags else 0.0)
    assert settings["gradient_checkpointing"] is ("--no_gradient_checkpointing" not in flags)
    assert training.key == training.original.id
    stated = overriding_flags(training)  # what the proof is given
    assert ("beta=0.1" in stated) is ("--beta" in flags)
    assert (f"per_device_train_batch_size={micro}" in stated) is bool(flags)


@pytest.mark.parametrize(
    ("command", "method"),
    [
        ("trl sft --config train.yaml", "sft"),
        ("accelerate launch -m trl.scripts.dpo --config train.yaml", "dpo"),
        ("torchrun --nproc_per_node 2 trl/scripts/sft.py --config train.yaml", "sft"),
        ("python train.py --output_dir runs/dpo", None),
    ],
)
def test_the_method_is_that_of_the_command(command: str, method: str | None) -> None:
    assert method_of(command.split()) == method


@dataclass
class TrainingSwitches:
    """Settings for the parser of transformers."""

    gradient_checkpointing: bool = True
    seed: int = 1


def test_flags_of_the_command_follow_the_changed_file() -> None:
    command = [
        "trl",
        "grpo",
        "--config",
        "a.yaml",
        "--per_device_train_batch_size",
        "8",
        "--seed=1",
    ]
    changed = with_settings(command, {"per_device_train_batch_size": 4, "seed": 2})
    assert changed == [*command[:5], "4", "--seed=2"]


def test_settings_are_read_from_the_flags_of_a_command() -> None:
    command = ["trl", "grpo", "--config", "a.yaml", "--bf16", "--beta=0.1", "--max-steps", "7"]
    expected = {"config": "a.yaml", "bf16": True, "beta": 0.1, "max_steps": 7}
    assert settings_of_flags(command) == expected


def test_a_switch_is_read_and_changed_as_transformers_parses_it() -> None:
    from transformers import HfArgumentParser

    parser = HfArgumentParser(TrainingSwitches)
    for flags in (
        [
            "--gradient_checkpointing",
            "--seed=3",
        ],
        [
            "--no_gradient_checkpointing",
            "--seed=3",
        ],
        [
            "--seed=3",
            "--no-gradient-checkpointing",
        ],
        [
            "--gradient-checkpointing",
            "false",
            "--seed",
            "3",
        ],
    ):
        # 1. Read.
        (before,) = parser.parse_args_into_dataclasses(flags)
        expected = {"gradient_checkpointing": before.gradient_checkpointing, "seed": 3}
        assert settings_of_flags(flags) == expected

        # 2. Changed: only this one.
        change = {"gradient_checkpointing": not before.gradient_checkpointing}
        (after,) = parser.parse_args_into_dataclasses(with_settings(flags, change))
        assert after == replace(before, **change)
