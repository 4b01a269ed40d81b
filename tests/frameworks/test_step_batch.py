"""`--global-batch` with every launched framework: optimizer steps have that many completions, or
the request is refused.
"""

from __future__ import annotations

import pytest

from autotune.core.errors import AutotuneError
from autotune.frameworks.transformers_trainer import TransformersTrainer
from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import parse_request

PROMPTS = {
    "verl": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "skyrl": "trainer.policy_mini_batch_size",
    "open-reasoner-zero": "rollout_batch_size",
}
COMPLETIONS = {
    "openrlhf": "train.batch_size",
    "prime-rl": "orchestrator.batch_size",
}


def request_of(framework: str, **flags: object) -> ParsedRequest:
    gpus = "A100-80G" if framework == "unsloth" else "2xA100-80G"
    all_flags = {
        "framework": framework,
        "model": "Qwen2.5-0.5B",
        "gpus": gpus,
        "mode": "predict",
        "num_generations": 8,
        **flags,
    }
    return parse_request(Flags(**all_flags))  # type: ignore[arg-type]


@pytest.mark.parametrize("framework", [*PROMPTS, *COMPLETIONS])
def test_the_setting_of_the_step_follows_from_the_flag(framework: str) -> None:
    settings = candidate_of_job(request_of(framework, global_batch=64)).settings
    assert {**PROMPTS, **COMPLETIONS}[framework] in settings
    assert settings[{**PROMPTS, **COMPLETIONS}[framework]] == (8 if framework in PROMPTS else 64)


@pytest.mark.parametrize("framework", ["swift", "unsloth"])
def test_accumulation_follows_from_the_flag_beyond_the_choices_of_the_space(framework: str) -> None:
    request = request_of(framework, global_batch=96)
    assert isinstance(request.trainer, TransformersTrainer)
    assert request.trainer.total_rows(candidate_of_job(request).settings, request.job.task) == 96


@pytest.mark.parametrize("framework", PROMPTS)
def test_a_batch_of_parts_of_groups_is_refused(framework: str) -> None:
    with pytest.raises(AutotuneError, match="the global batch is held at 68"):
        candidate_of_job(request_of(framework, global_batch=68))


@pytest.mark.parametrize("framework", COMPLETIONS)
def test_another_value_of_the_setting_beside_the_flag_is_refused(framework: str) -> None:
    with pytest.raises(AutotuneError, match="the global batch is held at 64"):
        candidate_of_job(
            request_of(framework, global_batch=64, hold=(f"{COMPLETIONS[framework]}=128",))
        )
