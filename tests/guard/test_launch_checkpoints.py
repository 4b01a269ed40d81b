"""Checkpoints of launch scripts: where the script's own settings put them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.guard.training import KnownTraining
from autotune.guard.watched import unseen_nodes
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import read_sources

SWIFT = (
    "swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl"
    " --per_device_train_batch_size 8 --num_generations 8 --max_length 256"
    " --max_completion_length 64 --output_dir mine {more}\n"
)
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo"
    " actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B data.train_batch_size=8"
    " data.max_prompt_length=256 data.max_response_length=64"
    " actor_rollout_ref.actor.ppo_mini_batch_size=8"
    " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8"
    " actor_rollout_ref.rollout.name=vllm trainer.n_gpus_per_node=1"
    " actor_rollout_ref.rollout.tensor_model_parallel_size=1"
    " actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8"
    " trainer.default_local_dir=mine {more}\n"
)


def training_of(folder: Path, script: str) -> KnownTraining:
    config = folder / "launch.sh"
    config.write_text(script)
    flags = Flags(from_command=str(config), gpus="A100-80G")
    request = read_sources(flags, mode="predict").parse()
    candidate = candidate_of_job(request)
    return KnownTraining(
        request=request,
        original=candidate,
        candidate=candidate,
        config=config,
        command_words=("bash", str(config)),
    )


@pytest.mark.parametrize("script", [SWIFT, VERL])
def test_the_folder_of_the_script_is_read(tmp_path: Path, script: str) -> None:
    checkpoints = training_of(tmp_path, script.format(more="")).checkpoints(0.0)
    assert checkpoints is not None and checkpoints.folder == Path("mine")


def test_a_micro_batch_that_would_change_the_number_of_steps_stays(tmp_path: Path) -> None:
    # A dropped last batch has another size after the change. A fixed number of steps has none.
    for more, keeps in (
        ("", False),
        ("--dataloader_drop_last true", True),
        ("--dataloader_drop_last false", False),
        ("--dataloader_drop_last true --max_steps 100", False),
    ):
        assert training_of(tmp_path, SWIFT.format(more=more)).keeps_batches is keeps, more


def test_the_nodes_of_a_launch_script_are_counted(tmp_path: Path) -> None:
    script = VERL.format(more="trainer.nnodes=2").replace("batch_size=8", "batch_size=16")
    training = training_of(tmp_path, script)
    assert unseen_nodes(training.launch_text, {}).startswith("this run has 2 nodes")
    assert "its GPUs are not on this machine" in training.limits
