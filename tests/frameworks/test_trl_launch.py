"""accelerate.yaml, against the ready-made configurations of the installed TRL."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from autotune.core.job import Hardware, Model, Task, Workload
from autotune.core.units import GIB
from autotune.estimate.sharding import Sharding
from autotune.frameworks.trl.launch_files import launch_configuration
from autotune.frameworks.trl.requests import sharding_request
from autotune.frameworks.trl.trainers import TrlGrpo


def task(ranks: int) -> Task:
    model = Model(
        name="m",
        config={"model_type": "qwen2"},
        folder=None,
        origin="made up",
    )
    hardware = Hardware(
        kind="cuda",
        name="A100-40G",
        count=ranks,
        memory_bytes=40 * GIB,
        here=False,
    )
    return Task(
        workload=Workload(
            model=model,
            python=Path("/usr/bin/python3"),
            tuning="full",
        ),
        hardware=hardware,
    )


def ready_made(name: str) -> dict[str, object]:
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL is not installed")
    content = (Path(spec.origin).parent / "accelerate_configs" / f"{name}.yaml").read_text()
    loaded: dict[str, object] = yaml.safe_load(content)
    return loaded


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3", "fsdp1", "fsdp2"])
def test_sharding_is_worded_as_trl_words_it(kind: str) -> None:
    written = launch_configuration(
        TrlGrpo().complete({"sharding": kind, "per_device_train_batch_size": 8}, task(4)), task(4)
    )
    trl_config = ready_made(kind)
    assert written["num_processes"] == 4
    for key in ("distributed_type", "fsdp_config", "mixed_precision"):
        assert written.get(key) == trl_config.get(key), key
    # TRL's own zero1 leaves out that nothing is offloaded, and pins the accumulation, which is the
    # trainer's to say.
    stage, their_stage = (
        written.get("deepspeed_config") or {},
        trl_config.get("deepspeed_config") or {},
    )
    assert isinstance(stage, dict) and isinstance(their_stage, dict)
    shared = stage.keys() & their_stage.keys()
    assert {name: stage[name] for name in shared} == {name: their_stage[name] for name in shared}
    assert their_stage.keys() - shared <= {"gradient_accumulation_steps"}


def test_fsdp1_trains_on_float32_masters_under_mixed_precision() -> None:
    """accelerate widens what trains, so that a shard has twice the bytes of its bfloat16
    weights.
    """
    job_task = task(2)
    for settings, masters in (({}, 4), ({"bf16": False}, None)):
        candidate = TrlGrpo().complete(
            {"sharding": "fsdp1", "per_device_train_batch_size": 8, **settings}, job_task
        )
        assert Sharding.of(sharding_request(candidate, job_task)).master_bytes == masters


def test_a_trace_is_told_that_fsdp2_keeps_parameters_on_the_host() -> None:
    """Otherwise they are counted on the device."""
    job_task = task(2)
    candidate = TrlGrpo().complete(
        {"sharding": "fsdp2", "per_device_train_batch_size": 8}, job_task
    )
    assert "options" not in sharding_request(candidate, job_task)
    offloaded = replace(candidate, settings={**candidate.settings, "fsdp_offload_params": True})
    assert sharding_request(offloaded, job_task)["options"] == {"offload_params": True}


@pytest.mark.parametrize(("ranks", "kind"), [(1, "NO"), (2, "MULTI_GPU")])
def test_a_copy_on_every_rank_is_plain(ranks: int, kind: str) -> None:
    written = launch_configuration(
        TrlGrpo().complete({"per_device_train_batch_size": 8}, task(ranks)), task(ranks)
    )
    assert written["distributed_type"] == kind
    assert "deepspeed_config" not in written and "fsdp_config" not in written
