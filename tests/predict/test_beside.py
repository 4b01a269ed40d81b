"""Models that a stand-in step does not run over: when they are there, and what they take then."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.composition import Resident
from autotune.measurement import PHASES
from autotune.models import find_model
from autotune.predict.beside import beside
from autotune.predict.predictor import stage_of
from autotune.units import MIB
from tests.predict.made import composition, training
from tests.predict.test_predictor import situation

TRACE = training(basis="generic")


SMALL = find_model("Qwen2.5-0.5B").config
"""The policy's, where its shape is asked for."""


A_CRITIC_OF_7B = 7_615_616_512 - 152_064 * 3584
"""Weights: it has a figure per token, and no vocabulary."""


def held(*others: Resident, **about: Any) -> Any:
    made = dataclasses.replace(composition(others=others), **about)
    return beside(TRACE, made, stage_of(situation(trace=TRACE)).usage(), SMALL)


def critic(**about: Any) -> Resident:
    return Resident(**{"role": "critic", "model": "made", "ranks": (0,), "dtype": "bfloat16", "trains": True, **about})


def test_a_model_is_there_in_its_own_phases_alone() -> None:
    reference = Resident(role="reference", model="made", ranks=(0,), dtype="bfloat16", trains=False, awake=("score",))
    assert held(reference) == {"score": {"reference_weights": 100 * MIB}}


def test_weights_that_are_spread_are_a_part_on_each_rank() -> None:
    reference = Resident(role="reference", model="made", ranks=(0, 1), dtype="bfloat16", trains=False, sharding="parameters")
    assert held(reference)["score"] == {"reference_weights": 50 * MIB}


def test_a_critic_is_held_as_the_policy_is_and_its_state_may_wait_on_the_host() -> None:
    stays, waits = held(critic()), held(critic(state_bytes_per_weight=0))
    assert set(stays) == set(PHASES)
    assert stays["rollout"]["critic_optimizer"] > 0 and "critic_optimizer" not in waits["rollout"]


def test_a_critic_that_trains_along_has_a_step_of_its_own() -> None:
    alone, along = held(critic()), held(critic(trains_along=True))
    assert along["backward"]["critic_activations"] > 0 and "critic_activations" not in alone["backward"]
    assert along["rollout"] == alone["rollout"]


def test_beside_adapters_a_critic_is_trained_in_full() -> None:
    adapted = dataclasses.replace(composition().residents[0], adapter_rank=8)
    made = dataclasses.replace(composition(), residents=(adapted, critic()))
    trace = dataclasses.replace(TRACE, inventory=dataclasses.replace(TRACE.inventory, parameters=1010))
    found = beside(trace, made, stage_of(situation(trace=TRACE)).usage(), SMALL)
    assert found["rollout"]["critic_optimizer"] == 8 * 1000
    assert found["backward"]["critic_gradients"] == 2 * 1000 and "critic_gradients" not in found["rollout"]


def test_another_model_is_as_large_as_its_own_shape() -> None:
    reward = Resident(role="reward", model="Qwen/Qwen2.5-0.5B", ranks=(0,), dtype="bfloat16", trains=False)
    assert held(reward)["score"]["reward_weights"] == pytest.approx(494_032_768 * 2)


def test_a_traced_step_has_them_in_it_but_for_who_judges() -> None:
    def found(*others: Resident) -> Any:
        return beside(training(), composition(others=others), stage_of(situation()).usage(), SMALL)

    reward = Resident(role="reward", model="Qwen/Qwen2.5-0.5B", ranks=(0,), dtype="bfloat16", trains=False)
    assert found(critic()) == {}
    assert set(found(critic(), reward)) == set(PHASES) and set(found(critic(), reward)["load"]) == {"reward_weights"}


def beyond(found: Any) -> int:
    return (
        sum(size for part, size in found["backward"].items() if part.startswith("critic_")) - found["rollout"]["critic_weights"]
    )


def test_a_larger_critic_takes_its_own_turn_with_its_own_shape() -> None:
    """What its turn takes beyond the policy's: a state that comes from the host, gradients and activations of its size."""
    count, ratio = A_CRITIC_OF_7B, 28 * 3584 / (24 * 896)
    about: dict[str, Any] = {"model": "Qwen/Qwen2.5-7B", "state_bytes_per_weight": 0}
    used = {use.phase: use.parts for use in stage_of(situation(trace=TRACE)).usage().phases}["backward"]
    theirs = sum(used.get(part, 0) for part in ("gradients", "activations", "logits"))
    own = round(used["activations"] * ratio) + 2 * count
    waiting = held(critic(**about))
    assert waiting["rollout"] == {"critic_weights": 2 * count}
    assert beyond(waiting) == own - theirs
    assert beyond(held(critic(**about, turn_bytes_per_weight=12))) == own - theirs + 12 * count
    leaving = held(critic(**about, turn_bytes_per_weight=12), away_in_rollout=("gradients", "optimizer"))
    assert beyond(leaving) == own - theirs + 12 * count - used["optimizer"]
    spread = held(critic(**about, turn_bytes_per_weight=12, ranks=(0, 1), sharding="parameters"))
    assert spread["backward"]["critic_optimizer"] == 6 * count


def test_a_smaller_critics_turn_is_no_peak() -> None:
    small = critic(model="Qwen/Qwen2.5-0.5B", state_bytes_per_weight=0)
    big = dataclasses.replace(composition(others=(small,)))
    config = find_model("Qwen2.5-72B").config
    logits = dataclasses.replace(TRACE, sizes=tuple(size * 100 for size in TRACE.sizes))
    found = beside(logits, big, stage_of(situation(trace=logits)).usage(), config)
    assert set(found["backward"]) == set(found["rollout"]) == {"critic_weights"}


def test_a_critic_that_leaves_brings_its_weights_in_its_turn_alone() -> None:
    found = held(
        critic(model="Qwen/Qwen2.5-7B", awake=(), turn_bytes_per_weight=8, dtype="float32"), away_in_rollout=("weights",)
    )
    assert "rollout" not in found and found["backward"]["critic_weights"] == 4 * A_CRITIC_OF_7B


def test_a_critic_of_another_model_trains_along_with_activations_of_its_size() -> None:
    used = stage_of(situation(trace=TRACE)).usage()
    most = max(use.parts.get("activations", 0) for use in used.phases)
    found = held(critic(model="Qwen/Qwen2.5-7B", trains_along=True))["backward"]
    assert found["critic_activations"] == round(most * 28 * 3584 / (24 * 896))
    assert found["critic_gradients"] == 2 * A_CRITIC_OF_7B, "once, and not the policy's beside them"


def test_a_critic_that_is_not_quantised_as_the_policy_is_has_its_own_weights() -> None:
    policy = dataclasses.replace(composition().residents[0], quantised_bits=4)
    made = dataclasses.replace(composition(), residents=(policy, critic(trains_along=True, model=policy.model)))
    found = beside(TRACE, made, stage_of(situation(trace=TRACE)).usage(), SMALL)
    assert found["rollout"]["critic_weights"] == 2 * 494_032_768


def test_gradients_are_there_in_a_forward_pass_where_one_came_before_it() -> None:
    def gradients(accumulation: int) -> bool:
        found = held(critic(model="Qwen/Qwen2.5-7B", trains_along=True), accumulation=accumulation)
        return "critic_gradients" in found["forward"]

    assert gradients(2) and not gradients(1)


def test_a_loop_that_keeps_logits_has_them_until_the_next_are_in_one_piece() -> None:
    whole, last = (rows * 4 * 16 * 151_936 for rows in (8, 2))
    keeping = held(keeps_logits_of=8, writes_at_a_time=2, completion_length=16)
    assert {phase: parts["logits"] for phase, parts in keeping.items() if phase != "rollout"} == {
        phase: whole for phase in PHASES if phase not in ("load", "rollout")
    }
    assert keeping["rollout"]["logits"] == 3 * whole, "nothing is generated in this trace: a copy beside the old and the new"
    assert 2 * whole + last < 3 * whole
