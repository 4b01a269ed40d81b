"""OpenRLHF without colocation: each model has GPUs of its own, all of which are counted, and the
answer holds for the critic's as well as the policy's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import CannotPredict
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request

PPO = (
    "python3 -m openrlhf.cli.train_ppo_ray"
    " --actor.model_name_or_path Qwen/Qwen2.5-0.5B-Instruct"
    " --actor.num_gpus_per_node 4 --critic.num_gpus_per_node 2 --ref.num_gpus_per_node 1"
    " --vllm.num_engines 1"
)
GPUS = 4 + 2 + 1 + 1  # policy, critic, reference, vLLM


def request_of(folder: Path, text: str, gpus: int = GPUS, **flags: Any) -> ParsedRequest:
    script = folder / "run.sh"
    script.write_text(f"{text}\n")
    return parse_request(
        Flags(
            from_command=str(script),
            gpus=f"{gpus}xA100-80G",
            mode="predict",
            **flags,
        )
    )


def test_every_model_counts(tmp_path: Path) -> None:
    candidate_of_job(request_of(tmp_path, PPO))
    with_too_few = request_of(tmp_path, PPO, gpus=GPUS - 1)
    assert with_too_few.job.task.hardware.count == 2 * (GPUS - 1), "the fewest whole nodes"
    assert "on which it can't be trained" in with_too_few.assumed[0]


def test_a_reference_beside_the_policy_needs_no_gpus(tmp_path: Path) -> None:
    candidate_of_job(request_of(tmp_path, f"{PPO} --train.colocate_actor_ref", gpus=GPUS - 1))


def test_the_fewer_gpus_of_the_critic_share_its_state(tmp_path: Path) -> None:
    """Two GPUs hold the critic's state, four the policy's: a half each, not a quarter."""
    request = request_of(tmp_path, PPO)
    trace = request.trainer.trace_request(candidate_of_job(request), request.job.task)
    sharding: Any = trace["sharding"]
    assert sharding["ranks"] == 2


def test_a_larger_critic_is_refused_and_its_size_predicted_instead(tmp_path: Path) -> None:
    text = f"{PPO} --critic.model_name_or_path Qwen/Qwen2.5-1.5B-Instruct"
    request = request_of(tmp_path, text)
    candidate = candidate_of_job(request)
    with pytest.raises(CannotPredict, match="larger than the policy") as refused:
        request.trainer.trace_request(candidate, request.job.task)
    assert refused.value.way_out.startswith("Type --model Qwen/Qwen2.5-1.5B-Instruct")
    instead = request_of(tmp_path, text, model="Qwen/Qwen2.5-1.5B-Instruct")
    assert instead.trainer.trace_request(candidate_of_job(instead), instead.job.task)


def test_unstated_gpus_are_shared_among_the_models(tmp_path: Path) -> None:
    text = (
        "python3 -m openrlhf.cli.train_ppo_ray"
        " --actor.model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --vllm.num_engines 2"
    )
    settings = candidate_of_job(request_of(tmp_path, text, gpus=8)).settings
    for section in ("actor", "critic", "ref"):
        assert settings[f"{section}.num_gpus_per_node"] == 2, "8 GPUs - 2 engines, three models"
