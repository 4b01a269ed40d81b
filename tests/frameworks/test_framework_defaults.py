"""What neither a script states nor a flag has the framework's own default, never one of ours.

The committed field lists are written from the releases. ms-swift has none, so that its defaults
stand here, read in the release (file of `swift/`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from autotune.core.errors import IllegalConfiguration
from autotune.frameworks.base import Field, plain_default
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request

MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
VERL = f"python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path={MODEL}"
MINIMAL = {
    "verl grpo": (
        f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.actor.use_dynamic_bsz=True"
        " actor_rollout_ref.rollout.n=8"
    ),
    "verl ppo": f"{VERL} actor_rollout_ref.actor.use_dynamic_bsz=True",
    "openrlhf": (
        f"python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path {MODEL}"
        " --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8"
        " --train.colocate_all --actor.num_gpus_per_node 4 --vllm.num_engines 4"
    ),
    "skyrl": (f"python -m skyrl.train.entrypoints.main_base trainer.policy.model.path={MODEL}"),
    "prime-rl": (
        f"uv run rl --model.name {MODEL} --orchestrator.batch-size 64 --orchestrator.group-size 8"
    ),
    "open-reasoner-zero": "python -m playground.orz_7b_ppo",
}
"""Launches with no more settings than the framework itself needs."""

FOLLOWING = {
    "verl grpo": {"trainer.n_gpus_per_node", "actor_rollout_ref.rollout.name"},
    "verl ppo": {"trainer.n_gpus_per_node", "actor_rollout_ref.rollout.name"},
    "openrlhf": {"ref.num_gpus_per_node", "ds.lora.rank"},
    "skyrl": {
        "trainer.placement.policy_num_gpus_per_node",
        "trainer.placement.ref_num_gpus_per_node",
        "generator.inference_engine.num_engines",
    },
    "prime-rl": {
        "deployment.num_infer_gpus",
        "deployment.num_train_gpus",
        "deployment.gpus_per_node",
        "inference.enable_lora",
    },
    "open-reasoner-zero": {
        "total_num_nodes",
        "actor_num_nodes",
        "ref_num_nodes",
        "critic_num_nodes",
        "vllm_num_engines",
        "critic_pretrain",
    },
}
"""Settings that follow from --gpus, from --model or from the method."""


def request_of(
    folder: Path,
    text: str,
    model: str | None = None,
) -> ParsedRequest:
    script = folder / "run.sh"
    script.write_text(f"{text}\n")
    return parse_request(
        Flags(
            from_command=str(script),
            gpus="4xA100-80G",
            mode="predict",
            model=model,
        )
    )


def expected_default(
    name: str,
    fields: dict[str, Field],
    stated: Mapping[str, object],
) -> object:
    """Return the default in the field list; where that is another setting, the value of it."""
    follows = fields[name].follows
    if follows is None:
        return plain_default(fields[name])
    return stated[follows] if follows in stated else expected_default(follows, fields, stated)


@pytest.mark.parametrize("launch", MINIMAL)
def test_every_setting_of_a_minimal_launch_has_its_default(launch: str, tmp_path: Path) -> None:
    request = request_of(tmp_path, MINIMAL[launch], model=MODEL)
    fields = dict(request.trainer.fields())
    stated = request.job.task.workload.stated
    checked = 0
    for name, value in candidate_of_job(request).settings.items():
        if name in stated or name in FOLLOWING[launch] or name not in fields:
            continue
        assert value == expected_default(name, fields, stated), name
        checked += 1
    assert checked >= 10


@pytest.mark.parametrize("launch", MINIMAL)
def test_every_knob_of_a_minimal_launch_has_its_default(launch: str, tmp_path: Path) -> None:
    request = request_of(tmp_path, MINIMAL[launch], model=MODEL)
    fields = dict(request.trainer.fields())
    stated = request.job.task.workload.stated
    for name, value in candidate_of_job(request).knobs.items():
        if value is not None and name in fields and name not in stated:
            assert value == expected_default(name, fields, stated) or name in FOLLOWING[launch], (
                name
            )


OF_SWIFT = {
    "use_vllm": False,  # rlhf_trainers/args_mixin.py
    "num_generations": 8,  # arguments/rlhf_args.py
    "max_completion_length": 512,  # arguments/rlhf_args.py
    "beta": 0.04,  # arguments/rlhf_args.py, _init_grpo
    "per_device_train_batch_size": 1,  # trainers/arguments.py
    "gradient_accumulation_steps": 1,  # arguments/rlhf_args.py, for GRPO
    "gradient_checkpointing": True,  # trainers/arguments.py
    "tuner_type": "lora",  # arguments/base_args/base_args.py
    "lora_rank": 8,  # arguments/tuner_args.py
    "deepspeed": None,  # arguments/sft_args.py
    "use_liger_kernel": False,  # trainers/arguments.py
}
OF_SWIFT_WITH_VLLM = {
    "vllm_gpu_memory_utilization": 0.9,
    "vllm_tensor_parallel_size": 1,
    "vllm_max_model_len": None,
    "vllm_enable_lora": False,
    "sleep_level": 0,
    "offload_model": False,
    "offload_optimizer": False,
    "move_model_batches": None,
}
"""All of rlhf_trainers/args_mixin.py."""

SWIFT = f"swift rlhf --rlhf_type grpo --model {MODEL} --dataset x"


def test_ms_swift_generates_without_vllm_unless_it_is_stated(tmp_path: Path) -> None:
    settings = candidate_of_job(request_of(tmp_path, f"{SWIFT} --num_generations 4")).settings
    for name, value in {**OF_SWIFT, "num_generations": 4}.items():
        assert settings[name] == value, name
    assert not settings.keys() & OF_SWIFT_WITH_VLLM.keys(), "they have no effect without vLLM"


def test_a_default_that_follows_from_the_model_is_said(tmp_path: Path) -> None:
    """`max_length` is None: the model's longest row (template/base.py), 32,768 tokens here."""
    text = f"{SWIFT} --num_generations 4"
    (line,) = [line for line in request_of(tmp_path, text).assumed if "max_length" in line]
    assert line.startswith("max_length=2048 where swift takes the model's longest row")
    assert not any(
        "max_length" in line for line in request_of(tmp_path, f"{text} --max_length 1024").assumed
    )


def test_ms_swifts_engine_has_its_own_defaults(tmp_path: Path) -> None:
    text = f"{SWIFT} --num_generations 4 --use_vllm true --vllm_mode colocate"
    settings = candidate_of_job(request_of(tmp_path, text)).settings
    for name, value in OF_SWIFT_WITH_VLLM.items():
        assert settings[name] == value, name


def test_sft_of_ms_swift_accumulates_sixteen_rows(tmp_path: Path) -> None:
    """`max(1, ceil(16 / per_device_train_batch_size / world_size))`, trainers/arguments.py."""
    text = f"swift sft --model {MODEL} --dataset x --per_device_train_batch_size 3"
    settings = candidate_of_job(request_of(tmp_path, text)).settings
    assert settings["gradient_accumulation_steps"] == 2, "16 rows / (3 x 4 GPUs), rounded up"


def test_vllm_without_a_mode_is_that_of_the_releases_that_need_none(tmp_path: Path) -> None:
    """Since 3.11 ms-swift raises ValueError without it (arguments/rlhf_args.py)."""
    request = request_of(tmp_path, f"{SWIFT} --num_generations 4 --use_vllm true")
    assert candidate_of_job(request).settings["vllm_mode"] == "colocate"
    assert any("default up to 3.10: later ones need it" in line for line in request.assumed)


def test_a_micro_batch_that_verl_requires_is_not_made_up(tmp_path: Path) -> None:
    text = f"{VERL} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
    with pytest.raises(IllegalConfiguration, match="ppo_micro_batch_size_per_gpu must be set"):
        request_of(tmp_path, text)
