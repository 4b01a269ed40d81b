"""Guarded trainings on an emulated card by the frameworks' own code: longer rows at a later step
need more memory than the card has, and the run goes on from its checkpoint for three further steps.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.worker import synthetic
from tests.emulator.on_cards import VARIABLE, interpreters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not interpreters(), reason=f"{VARIABLE} names no CUDA environment"),
]

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = Path(os.environ.get("AUTOTUNE_CUDA_FRAMEWORKS", ROOT / ".venvs"))
CARD = "1xL4"
SHORT_STEPS = 3
STEPS = 6
GENERATIONS = 8
SHORT_WORDS, LONG_WORDS = 4, 1800  # of four tokens each
# Activations of a long row: 8 layers x 4 tensors x 8192 x 2 bytes x 7300 tokens = 3.6 GiB. Eight
# rows don't fit into 22 GiB, four do.
MODEL = {"layers": 8, "intermediate": 8192, "positions": 16384}

SWIFT = """
USE_HF=1 {python} -m swift.cli.rlhf --rlhf_type grpo --model model --model_type qwen2 \\
  --template qwen2_5 --dataset rows.jsonl --dataset_shuffle false \\
  --train_dataloader_shuffle false --split_dataset_ratio 0 --per_device_train_batch_size 8 \\
  --gradient_accumulation_steps 1 --num_generations 8 --max_completion_length 64 \\
  --max_length 8192 --gradient_checkpointing false --tuner_type full --torch_dtype bfloat16 \\
  --reward_funcs format --output_dir out --save_steps 1 --max_steps 6 --logging_steps 1 \\
  --eval_strategy no --report_to none
"""
VERL = """
{python} -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
  data.train_files=rows.jsonl data.val_files=rows.jsonl data.shuffle=false \\
  data.dataloader_num_workers=0 data.filter_overlong_prompts=false data.train_batch_size=2 \\
  data.max_prompt_length=8192 data.max_response_length=64 \\
  actor_rollout_ref.model.path=model actor_rollout_ref.model.use_remove_padding=false \\
  actor_rollout_ref.model.enable_gradient_checkpointing=false \\
  +actor_rollout_ref.model.override_config.attn_implementation=sdpa \\
  actor_rollout_ref.actor.ppo_mini_batch_size=2 \\
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8 \\
  actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.rollout.name=vllm \\
  actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
  actor_rollout_ref.rollout.gpu_memory_utilization=0.2 \\
  actor_rollout_ref.rollout.enforce_eager=true actor_rollout_ref.rollout.ignore_eos=true \\
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1 \\
  actor_rollout_ref.rollout.agent.num_workers=1 \\
  actor_rollout_ref.rollout.max_num_batched_tokens=16384 \\
  reward.custom_reward_function.path=reward.py reward.num_workers=1 \\
  transfer_queue.backend.SimpleStorage.num_data_storage_units=2 \\
  ray_kwargs.ray_init.num_cpus=32 trainer.n_gpus_per_node=1 trainer.total_training_steps=6 \\
  trainer.val_before_train=false trainer.test_freq=-1 trainer.save_freq=1 \\
  'trainer.logger=["console"]' trainer.default_local_dir=checkpoints hydra.run.dir=hydra
"""
VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    return float(len(solution_str) % 2)
"""


@dataclass(frozen=True, kw_only=True)
class Guarded:
    """What is guarded, and what is read after it."""

    config: str
    command: Sequence[str]
    last_checkpoint: str  # pattern
    micro_batch: str  # setting
    step_line: str  # of the framework's log: expression with the number of a step


def test_trl_goes_on_after_longer_rows(tmp_path: Path) -> None:
    python = Path(interpreters()[0])
    _write_rows(tmp_path / "prompts" / "train.jsonl", 1, lambda text: {"prompt": text})
    settings = {
        "model_name_or_path": "model",
        "dataset_name": "prompts",
        "output_dir": "out",
        "reward_funcs": ["get_soft_overlong_punishment"],
        "per_device_train_batch_size": GENERATIONS,
        "gradient_accumulation_steps": 1,
        "num_generations": GENERATIONS,
        "max_completion_length": 64,
        "gradient_checkpointing": False,
        "bf16": True,
        "shuffle_dataset": False,
        "max_steps": STEPS,
        "save_steps": 1,
        "logging_steps": 1,
        "report_to": "none",
    }
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(settings))
    guarded = Guarded(
        config="train.yaml",
        command=(str(python.with_name("trl")), "grpo", "--config", "train.yaml"),
        last_checkpoint="out/checkpoint-6",
        micro_batch="per_device_train_batch_size",
        step_line=r"(\d+)/6 \[",
    )
    _assert_goes_on(tmp_path, python, guarded)


def test_ms_swift_goes_on_after_longer_rows(tmp_path: Path) -> None:
    python = _overlay("swift")
    _write_rows(tmp_path / "rows.jsonl", 1, lambda text: {"messages": _message(text)})
    guarded = Guarded(
        config="launch.sh",
        command=("bash", "launch.sh"),
        last_checkpoint="out/*/checkpoint-6",
        micro_batch="per_device_train_batch_size",
        step_line=r"'global_step/max_steps': '(\d+)/6'",
    )
    (tmp_path / "launch.sh").write_text(SWIFT.format(python=python))
    _assert_goes_on(tmp_path, python, guarded)


def test_verl_goes_on_after_longer_rows(tmp_path: Path) -> None:
    python = _overlay("verl")
    reward = {"reward_model": {"style": "rule", "ground_truth": ""}, "data_source": "made up"}
    _write_rows(tmp_path / "rows.jsonl", 2, lambda text: {"prompt": _message(text), **reward})
    guarded = Guarded(
        config="launch.sh",
        command=("bash", "launch.sh"),
        last_checkpoint="checkpoints/global_step_6",
        micro_batch="actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        step_line=r"step:(\d+) - training/epoch",
    )
    (tmp_path / "launch.sh").write_text(VERL.format(python=python))
    (tmp_path / "reward.py").write_text(VERL_REWARD)
    _assert_goes_on(tmp_path, python, guarded)


def _overlay(framework: str) -> Path:
    python = ENVIRONMENTS / f"cuda-{framework}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {python}: make cuda-frameworks")
    return python


def _message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _write_rows(file: Path, prompts_per_step: int, row: Callable[[str], dict[str, Any]]) -> None:
    """Write prompts that are short for three steps, and long from then on."""
    file.parent.mkdir(exist_ok=True)
    lines = []
    for number in range(40):
        is_long = number >= SHORT_STEPS * prompts_per_step
        text = " ".join(["one"] * (LONG_WORDS if is_long else SHORT_WORDS))
        lines.append(json.dumps(row(text)) + "\n")
    file.write_text("".join(lines))


def _assert_goes_on(folder: Path, python: Path, guarded: Guarded) -> None:
    # 1. The run, on a card of its own.
    config = {**synthetic.tiny_config(**MODEL), "dtype": "bfloat16"}
    synthetic.write_model_folder(folder / "model", config, weights=True)
    rehearse = [sys.executable, "-m", "autotune", "rehearse", "--gpus", CARD, "--stride", "16"]
    guard = [str(python), "-m", "autotune", "guard", guarded.config, "--no-proof"]
    done = subprocess.run(
        [*rehearse, "--python", str(python), "--", *guard, "--", *guarded.command],
        cwd=folder,
        env=_environment(folder),
        capture_output=True,
        text=True,
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed[-4000:]

    # 2. It ran out of memory with the first long rows, and went on from the checkpoint before.
    document = json.loads((folder / "autotune-guard" / "guard.json").read_text())
    first, last = document["attempts"]
    assert (first["end"]["reason"], first["end"]["cause"]) == ("memory", "activations")
    assert "CUDA out of memory" in first["end"]["evidence"]
    assert (first["last_step"], last["from_step"]) == (SHORT_STEPS, SHORT_STEPS)
    assert first["change"][guarded.micro_batch] in (2, 4)
    assert (last["end"]["reason"], last["last_step"]) == ("finished", STEPS)

    # 3. No step was made twice, and the last three were made by the restart.
    begin = printed.index("autotune guard: ended")
    steps_before = {int(step) for step in re.findall(guarded.step_line, printed[:begin])}
    steps_after = {int(step) for step in re.findall(guarded.step_line, printed[begin:])}
    assert steps_before - {0} == {1, 2, 3}
    assert steps_after - {0, SHORT_STEPS} == {4, 5, 6}
    assert list(folder.glob(guarded.last_checkpoint))


def _environment(folder: Path) -> dict[str, str]:
    added = {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "XDG_DATA_HOME": str(folder / "data"),
    }
    return {**os.environ, **added}
