"""Models that a stand-in step does not run over: when they are there, and what they take then."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.composition import Resident
from autotune.measurement import PHASES
from autotune.predict.beside import beside
from autotune.predict.predictor import use_of
from autotune.units import MIB
from tests.predict.made import composition, training
from tests.predict.test_predictor import situation

TRACE = training(basis="generic")


def held(*others: Resident, **about: Any) -> Any:
    made = dataclasses.replace(composition(others=others), **about)
    return beside(TRACE, made, use_of(situation(trace=TRACE)))


def critic(**about: Any) -> Resident:
    return Resident(**{"role": "critic", "model": "made", "ranks": (0,), "dtype": "bfloat16", "trains": True, **about})


def test_a_model_is_there_in_its_own_phases_alone() -> None:
    reference = Resident(role="reference", model="made", ranks=(0,), dtype="bfloat16", trains=False, awake=("score",))
    assert held(reference) == {"score": {"weights": 100 * MIB}}


def test_weights_that_are_spread_are_a_part_on_each_rank() -> None:
    reference = Resident(role="reference", model="made", ranks=(0, 1), dtype="bfloat16", trains=False, sharding="parameters")
    assert held(reference)["score"] == {"weights": 50 * MIB}


def test_a_critic_is_held_as_the_policy_is_and_its_state_may_wait_on_the_host() -> None:
    stays, waits = held(critic()), held(critic(state_bytes_per_weight=0))
    assert set(stays) == set(PHASES)
    assert stays["rollout"]["optimizer"] > 0 and "optimizer" not in waits["rollout"]


def test_a_critic_that_trains_along_has_a_step_of_its_own() -> None:
    alone, along = held(critic()), held(critic(trains_along=True))
    assert along["backward"]["activations"] > 0 and "activations" not in alone["backward"]
    assert along["rollout"] == alone["rollout"]


def test_beside_adapters_a_critic_is_trained_in_full() -> None:
    adapted = dataclasses.replace(composition().residents[0], adapter_rank=8)
    made = dataclasses.replace(composition(), residents=(adapted, critic()))
    trace = dataclasses.replace(TRACE, inventory=dataclasses.replace(TRACE.inventory, parameters=1010))
    found = beside(trace, made, use_of(situation(trace=TRACE)))
    assert found["rollout"]["optimizer"] == 8 * 1000
    assert found["backward"]["gradients"] == 2 * 1000 and "gradients" not in found["rollout"]


def test_another_model_is_as_large_as_its_own_shape() -> None:
    reward = Resident(role="reward", model="Qwen/Qwen2.5-0.5B", ranks=(0,), dtype="bfloat16", trains=False)
    assert held(reward)["score"]["weights"] == pytest.approx(494_032_768 * 2)


def test_a_traced_step_has_them_in_it() -> None:
    assert beside(training(), composition(others=(critic(),)), use_of(situation())) == {}
