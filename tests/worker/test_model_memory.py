"""Bytes by model: models with optimizers of their own, exact to the byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.worker.drive import inside

torch = pytest.importorskip("torch")

WIDE = 4 * 64 * 64
"""Bytes of a square layer in float32."""


def layer() -> Any:
    return torch.nn.Linear(64, 64, bias=False)


def stepped(model: Any) -> Any:
    """Return Adam after a step, with the gradients still present."""
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    return optimizer


def weighed(model: Any, optimizer: Any, device: str = "cpu", **models: Any) -> dict[str, int]:
    accelerator = SimpleNamespace(device=torch.device(device), unwrap_model=lambda model: model)
    trainer = SimpleNamespace(
        model=model,
        optimizer=optimizer,
        accelerator=accelerator,
        **models,
    )
    part_bytes: dict[str, int] = inside("trl.trainer_settings").model_bytes(trainer)
    return part_bytes


def test_the_policy_and_every_model_beside_it_have_parts_of_their_own() -> None:
    policy = torch.nn.Sequential(layer(), layer())
    part_bytes = weighed(
        policy, stepped(policy), ref_model=layer(), reward_funcs=[len, layer(), layer()]
    )
    assert part_bytes == {
        "weights": 2 * WIDE,
        "gradients": 2 * WIDE,
        "optimizer": 4 * WIDE,
        "reference_weights": WIDE,
        "reward_weights": 2 * WIDE,
    }


def test_a_critic_that_is_trained_by_the_same_optimizer_has_its_own_states() -> None:
    critic = layer()
    combined = torch.nn.Sequential(
        layer(), critic
    )  # as TRL's PPO wraps policy and value model together
    part_bytes = weighed(combined, stepped(combined), value_model=critic)
    for part, size in (("weights", WIDE), ("gradients", WIDE), ("optimizer", 2 * WIDE)):
        assert part_bytes[part] == part_bytes[f"critic_{part}"] == size


def test_an_adapter_is_what_is_trained_of_an_adapted_model() -> None:
    model = torch.nn.Sequential(layer(), layer())
    model[0].requires_grad_(False)
    model.peft_config = {}
    assert weighed(model, stepped(model)) == {
        "weights": WIDE,
        "adapters": WIDE,
        "gradients": WIDE,
        "optimizer": 2 * WIDE,
    }


def test_shared_storage_counts_once() -> None:
    policy, reference = layer(), layer()
    reference.weight = policy.weight
    optimizer = stepped(policy)
    policy.again = torch.nn.Buffer(policy.weight.detach()[:8])
    assert weighed(policy, optimizer, ref_model=reference)["reference_weights"] == WIDE
    assert "weights" not in weighed(policy, optimizer, ref_model=reference)


def test_host_memory_has_parts_of_its_own_beside_a_gpu() -> None:
    policy = layer()
    assert weighed(policy, stepped(policy), device="cuda") == {
        "weights_on_host": WIDE,
        "gradients_on_host": WIDE,
        "optimizer_on_host": 2 * WIDE,
    }


def test_deepspeeds_masters_and_shards_are_found_behind_its_wrappers() -> None:
    """Layout of ZeRO-3: an empty parameter with a shard, flat masters, gradients in a buffer."""
    policy = layer()
    states = stepped(layer())
    policy.weight.ds_tensor = torch.zeros(64 * 32)
    policy.weight.data = torch.empty(0)
    master = torch.zeros(64 * 32)
    zero = SimpleNamespace(
        optimizer=states,
        fp32_partitioned_groups_flat=[master],
        grad_partitions_flat_buffer=torch.zeros(64 * 32),
    )
    part_bytes = weighed(policy, SimpleNamespace(optimizer=zero))
    assert (part_bytes["weights"], part_bytes["gradients"]) == (WIDE // 2, WIDE // 2)
    assert (
        part_bytes["optimizer"] == WIDE // 2 + 3 * WIDE
    )  # the stand-in's two moments, and the weight that it is about
