"""Seconds of scoring a batch: passes, gathers of sharded weights, and a reference's passes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.catalog import efficiency
from autotune.core.composition import Composition
from autotune.core.trace import Trace
from autotune.estimate.sharding import Sharding, apply
from autotune.request.flags import Flags
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import parse_request
from tests.estimate.synthetic import gpu_of
from tests.estimate.test_sharding import with_adapters
from tests.estimate.test_throughput import composition, seconds, trace


def test_a_reference_scores_the_batch_once_more() -> None:
    once = seconds(trace())["score"]
    twice = seconds(trace(), scorings=2)["score"]
    assert twice == once.scaled(2)


@pytest.mark.parametrize("scorings", [1, 2])
def test_a_pass_over_sharded_weights_gathers_each_unit_once(scorings: int) -> None:
    """Two ranks: each sends half of the weights for each pass, half of which is exposed, and waits
    for each of four layers and the rest.
    """
    inventory = replace(trace().inventory, layer_bytes=(1,) * 4)
    step = replace(trace(), inventory=inventory)
    changes = {"ranks": 2, "generation_batch": 32, "scorings": scorings}
    plain = seconds(step, sharded_by="ddp", **changes)["score"]
    sharded = seconds(step, sharded_by="fsdp2", **changes)["score"]

    rate = (gpu_of("A100-80G").link_gb_per_second or 0) * 1e9 * efficiency("link_share").value
    sent = inventory.weight_bytes / 2 / rate * efficiency("exposed_exchange_share").value
    waits = 5 * efficiency("sharded_unit_milliseconds").value / 1000
    assert sharded.value - plain.value == pytest.approx(scorings * (sent + waits), rel=1e-6)
    assert sharded.low <= sharded.value <= sharded.high


def test_a_pass_gathers_each_matrix_of_an_adapter_under_fsdp1() -> None:
    """Eight matrices, one pass."""
    step = replace(trace(), adapter_units=8)
    policy = replace(composition()["policy"], adapter_rank=16)

    def score(traced: Trace) -> float:
        changes = {"residents": (policy,), "ranks": 2, "generation_batch": 32}
        return seconds(traced, sharded_by="fsdp1", **changes)["score"].value

    wait = efficiency("adapter_unit_milliseconds").value / 1000
    assert score(step) - score(trace()) == pytest.approx(8 * wait)


def test_a_sharded_step_knows_its_units() -> None:
    """FSDP1 makes a unit of each matrix of an adapter; a sharded trace has no modules."""
    step = with_adapters()
    assert step.usage is not None
    matrices = sum(parameter.trains for parameter in step.usage.parameters)
    sharded = apply(step, Sharding(kind="fsdp1", ranks=4)).trace
    assert sharded.usage is None
    assert sharded.adapter_units == matrices > 0


def composed(use_kl_loss: bool) -> Composition:
    flags = Flags(
        framework="verl",
        method="grpo",
        tuning="lora",
        model="Qwen/Qwen2.5-7B-Instruct",
        gpus="8xH100",
        mode="predict",
        set=(f"actor_rollout_ref.actor.use_kl_loss={str(use_kl_loss).lower()}",),
    )
    request = parse_request(flags)
    return request.trainer.compose(candidate_of_job(request), request.job.task)


def test_verls_reference_scores_if_a_divergence_is_in_the_loss() -> None:
    assert composed(use_kl_loss=True).scorings == 2
    assert composed(use_kl_loss=False).scorings == 1
