"""Flags behind CONFIG win over it, as they do in TRL: the guard reads and changes them."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

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


def test_a_flag_wins_over_the_file_and_follows_the_change(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "trl.sh").write_text(TRAINING)
    flags = ("--per_device_train_batch_size", "16", "--output_dir=of-the-flag")
    guard = ("guard", "train.yaml", "--gpus", "cpu", "--no-proof", "--")
    command = ("bash", "trl.sh", "grpo", "--config", "train.yaml", *flags)
    done = autotune(*guard, *command, cwd=tmp_path, timeout=120)
    assert done.code == 0, done.err

    # 1. 16 rows at a time ran out, not the 8 of the file.
    first, second = json.loads((tmp_path / "autotune-guard" / "guard.json").read_text())["attempts"]
    assert "per_device_train_batch_size=8 (was 16)" in done.err
    assert first["change"]["gradient_accumulation_steps"] == 4, "16 x 2 rows are a step"

    # 2. The restart has them in flag and file, and goes on from the folder of the flag.
    _, restart = (tmp_path / "starts").read_text().splitlines()
    assert "--per_device_train_batch_size 8" in restart
    changed = yaml.safe_load((tmp_path / second["config"]).read_text())
    assert changed["per_device_train_batch_size"] == 8
    assert second["from_step"] == 3
    assert changed["resume_from_checkpoint"].endswith("of-the-flag/checkpoint-3")
