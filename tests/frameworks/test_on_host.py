"""Frameworks whose settings keep training state or an engine's weights on the host."""

from __future__ import annotations

import pytest

from autotune.core.composition import Composition
from autotune.frameworks.base import Settings
from tests.frameworks.stand_ins import case_of


def composed(framework: str, method: str, settings: Settings) -> Composition:
    trainer, candidate, task = case_of(framework, method, settings=settings)
    return trainer.compose(candidate, task)


@pytest.mark.parametrize(
    ("framework", "method", "settings", "steps", "weights"),
    [
        (
            "trl",
            "sft",
            {"sharding": "zero2"},
            False,
            False,
        ),
        (
            "trl",
            "sft",
            {"sharding": "zero2", "offload_optimizer_device": "cpu"},
            True,
            False,
        ),
        (
            "trl",
            "sft",
            {
                "sharding": "zero3",
                "offload_optimizer_device": "cpu",
                "offload_param_device": "cpu",
            },
            True,
            True,
        ),
        (
            "trl",
            "sft",
            {"sharding": "fsdp1", "fsdp_offload_params": True},
            True,
            True,
        ),
        (
            "swift",
            "sft",
            {"deepspeed": "zero3"},
            False,
            False,
        ),
        (
            "swift",
            "sft",
            {"deepspeed": "zero2_offload"},
            True,
            False,
        ),
        (
            "swift",
            "sft",
            {"deepspeed": "zero3_offload"},
            True,
            True,
        ),
        (
            "openrlhf",
            "grpo",
            {"ds.adam_offload": False},
            False,
            False,
        ),
        (
            "openrlhf",
            "grpo",
            {"ds.adam_offload": True},
            True,
            False,
        ),
        (
            "open-reasoner-zero",
            "grpo",
            {"adam_offload": True},
            True,
            False,
        ),
    ],
)
def test_what_waits_on_the_host(
    framework: str,
    method: str,
    settings: Settings,
    steps: bool,
    weights: bool,
) -> None:
    composition = composed(framework, method, settings)
    assert (composition.steps_on_host, composition.weights_on_host) == (steps, weights)


def test_what_fsdp1_keeps_on_the_host_is_said_to_be_counted_on_the_gpus() -> None:
    offloading = composed("trl", "sft", {"sharding": "fsdp1", "fsdp_offload_params": True})
    assert any("fsdp_offload_params" in note for note in offloading.notes)
    assert composed("trl", "sft", {"sharding": "fsdp1"}).notes == ()


def test_engines_keep_their_weights_at_sleep_level_1() -> None:
    """OpenRLHF sleeps at level 1 always, ms-swift as stated, TRL at level 2."""
    openrlhf = composed("openrlhf", "grpo", {"vllm.enable_sleep": True})
    assert openrlhf.engine is not None and openrlhf.engine.keeps_weights
    for level, keeps in ((1, True), (2, False)):
        colocated: Settings = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "sleep_level": level,
        }
        swift = composed("swift", "grpo", colocated)
        assert swift.engine is not None and swift.engine.keeps_weights == keeps
    sleeping: Settings = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": True,
    }
    trl = composed("trl", "grpo", sleeping)
    assert trl.engine is not None and not trl.engine.keeps_weights


def test_activations_of_trl_wait_on_the_host_but_for_the_newest() -> None:
    assert composed("trl", "sft", {"activation_offloading": True}).activations_in_flight == 5
    assert composed("trl", "sft", {}).activations_in_flight is None
