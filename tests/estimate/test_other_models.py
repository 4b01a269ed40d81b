"""Models outside a generic step: their phases and their memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.catalog.model_lookup import find_model
from autotune.core.composition import Resident
from autotune.core.measurement import PHASES
from autotune.core.units import MIB
from autotune.estimate.other_models import other_model_bytes
from autotune.estimate.predictor import stage_of
from tests.estimate.synthetic import composition, situation, training

TRACE = training(basis="generic")


SMALL = find_model("Qwen2.5-0.5B").config
"""config.json of the policy, for its shape."""


A_CRITIC_OF_7B = 7_615_616_512 - 152_064 * 3584
"""Parameters of a 7B critic: one value per token, no vocabulary."""


def other_bytes(*residents: Resident, **about: Any) -> Any:
    composed = dataclasses.replace(composition(other_models=residents), **about)
    return other_model_bytes(TRACE, composed, stage_of(situation(trace=TRACE)).usage(), SMALL)


def critic(**about: Any) -> Resident:
    return Resident(
        **{
            "role": "critic",
            "model": "made",
            "ranks": (0,),
            "dtype": "bfloat16",
            "trains": True,
            **about,
        }
    )


def test_a_model_counts_in_its_own_phases_alone() -> None:
    reference = Resident(
        role="reference",
        model="made",
        ranks=(0,),
        dtype="bfloat16",
        trains=False,
        awake=("score",),
    )
    assert other_bytes(reference) == {"score": {"reference_weights": 100 * MIB}}


def test_a_model_that_the_script_keeps_is_there_in_every_phase() -> None:
    judge = Resident(
        role="beside",
        model="any",
        ranks=(0,),
        dtype="bfloat16",
        trains=False,
        weight_bytes=7 * MIB,
    )
    by_phase = other_bytes(judge)
    assert set(by_phase) == set(PHASES)
    assert set(by_phase["load"].items()) == {("beside_weights", 7 * MIB)}
    assert all(parts == by_phase["load"] for parts in by_phase.values())


def test_sharded_weights_are_divided_by_the_ranks() -> None:
    reference = Resident(
        role="reference",
        model="made",
        ranks=(0, 1),
        dtype="bfloat16",
        trains=False,
        sharding="parameters",
    )
    assert other_bytes(reference)["score"] == {"reference_weights": 50 * MIB}


def test_a_critic_is_held_like_the_policy_and_its_state_may_be_offloaded() -> None:
    stays, waits = other_bytes(critic()), other_bytes(critic(state_bytes_per_weight=0))
    assert set(stays) == set(PHASES)
    assert stays["rollout"]["critic_optimizer"] > 0 and "critic_optimizer" not in waits["rollout"]


def test_a_concurrently_trained_critic_has_its_own_step() -> None:
    sequential, along = other_bytes(critic()), other_bytes(critic(trains_concurrently=True))
    assert (
        along["backward"]["critic_activations"] > 0
        and "critic_activations" not in sequential["backward"]
    )
    assert along["rollout"] == sequential["rollout"]


def test_with_adapters_on_the_policy_a_critic_is_trained_in_full() -> None:
    adapted = dataclasses.replace(composition().residents[0], adapter_rank=8)
    composed = dataclasses.replace(composition(), residents=(adapted, critic()))
    trace = dataclasses.replace(
        TRACE, inventory=dataclasses.replace(TRACE.inventory, parameters=1010)
    )
    by_phase = other_model_bytes(trace, composed, stage_of(situation(trace=TRACE)).usage(), SMALL)
    assert by_phase["rollout"]["critic_optimizer"] == 8 * 1000
    assert (
        by_phase["backward"]["critic_gradients"] == 2 * 1000
        and "critic_gradients" not in by_phase["rollout"]
    )


def test_another_model_has_the_size_of_its_own_shape() -> None:
    reward = Resident(
        role="reward",
        model="Qwen/Qwen2.5-0.5B",
        ranks=(0,),
        dtype="bfloat16",
        trains=False,
    )
    assert other_bytes(reward)["score"]["reward_weights"] == pytest.approx(494_032_768 * 2)


def test_a_traced_step_contains_all_models_but_the_reward() -> None:
    def traced_bytes(*residents: Resident) -> Any:
        return other_model_bytes(
            training(), composition(other_models=residents), stage_of(situation()).usage(), SMALL
        )

    reward = Resident(
        role="reward",
        model="Qwen/Qwen2.5-0.5B",
        ranks=(0,),
        dtype="bfloat16",
        trains=False,
    )
    assert traced_bytes(critic()) == {}
    assert set(traced_bytes(critic(), reward)) == set(PHASES) and set(
        traced_bytes(critic(), reward)["load"]
    ) == {"reward_weights"}


def excess(by_phase: Any) -> int:
    return (
        sum(size for part, size in by_phase["backward"].items() if part.startswith("critic_"))
        - by_phase["rollout"]["critic_weights"]
    )


def test_a_larger_critics_turn_has_its_own_shape() -> None:
    """The excess over the policy's turn: state from the host, gradients and activations of its
    size.
    """
    count, ratio = A_CRITIC_OF_7B, 28 * 3584 / (24 * 896)
    about: dict[str, Any] = {"model": "Qwen/Qwen2.5-7B", "state_bytes_per_weight": 0}
    used = {use.phase: use.parts for use in stage_of(situation(trace=TRACE)).usage().phases}[
        "backward"
    ]
    policy_turn = sum(used.get(part, 0) for part in ("gradients", "activations", "logits"))
    critic_turn = round(used["activations"] * ratio) + 2 * count
    waiting = other_bytes(critic(**about))
    assert waiting["rollout"] == {"critic_weights": 2 * count}
    assert excess(waiting) == critic_turn - policy_turn
    assert (
        excess(other_bytes(critic(**about, offloaded_bytes_per_weight=12)))
        == critic_turn - policy_turn + 12 * count
    )
    leaving = other_bytes(
        critic(**about, offloaded_bytes_per_weight=12),
        offloaded_in_rollout=("gradients", "optimizer"),
    )
    assert excess(leaving) == critic_turn - policy_turn + 12 * count - used["optimizer"]
    spread = other_bytes(
        critic(
            **about,
            offloaded_bytes_per_weight=12,
            ranks=(0, 1),
            sharding="parameters",
        )
    )
    assert spread["backward"]["critic_optimizer"] == 6 * count


def test_a_smaller_critics_turn_is_no_peak() -> None:
    small = critic(model="Qwen/Qwen2.5-0.5B", state_bytes_per_weight=0)
    big = dataclasses.replace(composition(other_models=(small,)))
    config = find_model("Qwen2.5-72B").config
    logits = dataclasses.replace(TRACE, sizes=tuple(size * 100 for size in TRACE.sizes))
    by_phase = other_model_bytes(logits, big, stage_of(situation(trace=logits)).usage(), config)
    assert set(by_phase["backward"]) == set(by_phase["rollout"]) == {"critic_weights"}


def test_an_offloaded_critic_has_weights_in_its_turn_alone() -> None:
    by_phase = other_bytes(
        critic(
            model="Qwen/Qwen2.5-7B",
            awake=(),
            offloaded_bytes_per_weight=8,
            dtype="float32",
        ),
        offloaded_in_rollout=("weights",),
    )
    assert (
        "rollout" not in by_phase and by_phase["backward"]["critic_weights"] == 4 * A_CRITIC_OF_7B
    )


def test_a_concurrent_critic_of_another_model_has_activations_of_its_size() -> None:
    used = stage_of(situation(trace=TRACE)).usage()
    largest = max(use.parts.get("activations", 0) for use in used.phases)
    parts = other_bytes(critic(model="Qwen/Qwen2.5-7B", trains_concurrently=True))["backward"]
    assert parts["critic_activations"] == round(largest * 28 * 3584 / (24 * 896))
    assert parts["critic_gradients"] == 2 * A_CRITIC_OF_7B, "once, without the policy's"


def test_a_critic_quantised_differently_has_its_own_weights() -> None:
    policy = dataclasses.replace(composition().residents[0], quantised_bits=4)
    composed = dataclasses.replace(
        composition(), residents=(policy, critic(trains_concurrently=True, model=policy.model))
    )
    by_phase = other_model_bytes(TRACE, composed, stage_of(situation(trace=TRACE)).usage(), SMALL)
    assert by_phase["rollout"]["critic_weights"] == 2 * 494_032_768


def test_gradients_exist_in_a_forward_pass_after_another_one() -> None:
    def gradients(accumulation: int) -> bool:
        by_phase = other_bytes(
            critic(model="Qwen/Qwen2.5-7B", trains_concurrently=True), accumulation=accumulation
        )
        return "critic_gradients" in by_phase["forward"]

    assert gradients(2) and not gradients(1)
