"""TRL's PPO as it is predicted: who is there beside the policy, on which ranks, with which
state.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune import frameworks
from autotune.core.composition import Composition, Resident
from autotune.core.job import Task
from tests.frameworks.stand_ins import asked, task


def composed(*, tuning: str = "full", gpus: int = 2, **settings: Any) -> Composition:
    trainer, candidate, made = asked("trl", "ppo", tuning=tuning, gpus=gpus, settings=settings)
    assert trainer.why_illegal(candidate, made) is None
    return trainer.compose(candidate, made)


def test_all_four_models_are_there_and_the_critic_learns_along() -> None:
    made = composed()
    assert [resident.role for resident in made.residents] == [
        "policy",
        "reference",
        "critic",
        "reward",
    ]
    assert (
        made["critic"].trains and made["critic"].trains_concurrently and not made["reward"].trains
    )
    assert made["critic"].state_bytes_per_weight == 2 * 2, (
        "Adam's two moments in the weights' own bfloat16"
    )
    assert all(resident.ranks == (0, 1) for resident in made.residents)


def test_under_an_adapter_the_policy_is_its_own_reference_and_the_critic_is_trained_whole() -> None:
    made = composed(tuning="qlora")
    assert "reference" not in made and made["policy"].adapter_rank == 16
    assert made["policy"].quantised_bits == 4 and made["critic"].quantised_bits is None


def test_zero_spreads_the_critic_with_the_policy_and_the_frozen_ones_from_its_third_stage_on() -> (
    None
):
    second, third = composed(sharding="zero2"), composed(sharding="zero3")
    assert (second["critic"].sharding, second["reward"].sharding, second["reference"].sharding) == (
        "gradients",
        "none",
        "none",
    )
    assert {resident.sharding for resident in third.residents} == {"parameters"}
    assert second["critic"].state_bytes_per_weight == 12
    assert (
        composed(sharding="zero2", offload_optimizer_device="cpu")["critic"].state_bytes_per_weight
        == 0
    )


def test_the_loop_keeps_the_logits_of_a_whole_update_and_writes_a_part_of_it_at_a_time() -> None:
    made = composed(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        local_rollout_forward_batch_size=16,
    )
    assert (made.retained_logits, made.generation_micro_batch, made.generation_batch) == (
        32,
        16,
        64,
    )
    assert made.generation == "trainer" and made.empties_rollout_cache


def test_checkpointing_is_not_counted_for_the_loop_never_switches_it_on() -> None:
    trainer, candidate, made = asked(
        "trl", "ppo", gpus=1, settings={"gradient_checkpointing": True}
    )
    request: Any = trainer.trace_request(candidate, made)
    assert (
        request["settings"]["gradient_checkpointing"] is False
        and request["settings"]["max_grad_norm"] == 0
    )
    assert any("never enables it" in note for note in trainer.compose(candidate, made).notes)


@pytest.mark.parametrize("named", [None, "Qwen/Qwen2.5-0.5B"])
def test_critic_and_reward_model_are_the_one_that_is_named(named: str | None) -> None:
    plain = task("trl", "ppo", gpus=1)
    about = dataclasses.replace(
        plain.workload, user_settings={} if named is None else {"reward_model_path": named}
    )
    made, trainer = Task(workload=about, hardware=plain.hardware), frameworks.trainer("trl", "ppo")
    others: list[Resident] = [
        trainer.compose(trainer.complete({}, made), made)[role] for role in ("critic", "reward")
    ]
    assert {one.model for one in others} == {named or plain.workload.model.name}
