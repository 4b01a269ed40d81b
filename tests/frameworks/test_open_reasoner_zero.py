"""Open-Reasoner-Zero's settings, rules and models, against what its experiments and trainer say."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.core.measurement import ProbePlan
from autotune.frameworks.stand_in import StandIn
from tests.frameworks.stand_ins import case_of, refusal

NAME = "open-reasoner-zero"


def test_the_experiments_own_defaults_but_for_the_gpus() -> None:
    trainer, candidate, task = case_of(NAME, "ppo")
    assert trainer.why_illegal(candidate, task) is None
    assert (
        candidate.settings["rollout_batch_size"],
        candidate.settings["n_samples_per_prompt"],
    ) == (128, 64)
    assert candidate.settings["packing_max_len"] == 16384
    assert candidate.settings["actor_num_nodes"] == 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"packing_max_len": 4096},
            "packing_max_len=4096 is less than prompt_max_len + generate_max_len = 10048",
        ),
        ({"micro_train_batch_size": 4}, "must be 1"),
        ({"vllm_tensor_parallel_size": 2}, "colocate_all excludes"),
        ({"actor_num_nodes": 4}, "must be 8"),
        ({"zero_stage": 2}, "zero_stage=2 must be 3"),
        ({"n_samples_per_prompt": 0}, "not above zero"),
    ],
)
def test_what_it_refuses_is_refused_with_setting_and_value(
    settings: dict[str, Any], message: str
) -> None:
    reason = refusal(NAME, settings=settings)
    assert reason is not None and message in reason


def test_it_has_no_adapters() -> None:
    assert "use --tuning full" in str(refusal(NAME, tuning="lora"))


def test_a_pack_is_one_micro_batch() -> None:
    trainer, candidate, task = case_of(NAME, max_prompt_length=1024, max_completion_length=3072)
    spec: Any = trainer.trace_request(candidate, task)
    assert spec["settings"]["per_device_train_batch_size"] == 4
    assert sum(spec["lengths"][part] for part in ("prompt", "completion")) == 4096


def test_models_take_turns_and_the_reference_stays() -> None:
    trainer, candidate, task = case_of(NAME, "ppo")
    composition = trainer.compose(candidate, task)
    assert set(composition.offloaded_in_rollout) == {"gradients", "optimizer"}
    assert (
        composition["critic"].state_bytes_per_weight == 0 and composition["reference"].awake is None
    )
    assert (
        composition.engine is not None
        and composition.engine.eager
        and composition.engine.max_num_seqs == 128
    )
    assert composition.processes == 4


def test_grpo_has_no_critic_and_says_so_since_the_experiment_has_one_of_7b() -> None:
    trainer, candidate, task = case_of(NAME)
    assert "critic" not in trainer.compose(candidate, task)
    assert candidate.settings["use_grpo"] is True
    assert (
        isinstance(trainer, StandIn)
        and "exp.critic_pretrain=" in trainer.launch(candidate, task, ProbePlan()).argv
    )


def test_a_critic_is_the_models_own_unless_another_is_named() -> None:
    trainer, candidate, task = case_of(NAME, "ppo", model="Qwen2.5-1.5B")
    assert isinstance(trainer, StandIn)
    assert (
        "exp.critic_pretrain=Qwen/Qwen2.5-1.5B" in trainer.launch(candidate, task, ProbePlan()).argv
    )
    assert trainer.compose(candidate, task)["critic"].model == task.workload.model.name
    trainer, candidate, task = case_of(
        NAME, "ppo", model="Qwen2.5-1.5B", settings={"critic_pretrain": "Qwen/Qwen2.5-7B"}
    )
    critic = trainer.compose(candidate, task)["critic"]
    assert (critic.model, critic.offloaded_bytes_per_weight) == ("Qwen/Qwen2.5-7B", 12)
    offloaded = case_of(NAME, "ppo", settings={"adam_offload": True})
    assert offloaded[0].compose(*offloaded[1:])["critic"].offloaded_bytes_per_weight == 0
