"""Probes of a model sharded over two gloo ranks by DeepSpeed and FSDP2, under a real worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autotune.core.job import Model, Task
from autotune.core.measurement import Measurement, Outcome, ProbePlan
from autotune.core.space import Candidate
from autotune.frameworks import trainer
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings
from autotune.worker.synthetic import tiny_config
from tests.frameworks.conftest import make_task

ADAPTER = Path(__file__).with_name("gloo_as_gpus.py")
RANKS = 2
PLAN = ProbePlan(
    optimizer_steps=2,
    warmup_cycles=1,
    timed_cycles=1,
    deadline_seconds=240,
)
SMALL = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "num_generations": 4,
    "max_prompt_length": 16,
    "max_completion_length": 8,
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]
needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)
KINDS = ["fsdp2", *(pytest.param(kind, marks=needs_deepspeed) for kind in ("zero2", "zero3"))]


def task(tuning: str) -> Task:
    ranked_task = make_task(RANKS, tuning=tuning)
    model = Model(
        name="tiny",
        config=tiny_config(
            vocab=512,
            layers=2,
            hidden=512,
        ),
        folder=None,
        origin="made up",
    )
    return replace(ranked_task, workload=replace(ranked_task.workload, model=model))


def candidate(task: Task, **knobs: Any) -> Candidate:
    return trainer("trl").complete({**SMALL, **knobs}, task)


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Any]:
    started: list[LocalExecutor] = []

    def measure(
        task: Task,
        candidate: Candidate,
        limit: int = 6 * 2**30,
    ) -> Measurement:
        trl = trainer("trl")
        executor = LocalExecutor(
            RunnerSettings(
                python=task.workload.python,
                adapter=str(ADAPTER),
                ranks=RANKS,
                limit_bytes=limit,
                scratch_root=tmp_path,
            ),
            RequestBuilders(
                load=lambda loaded: trl.load_request(loaded, task),
                probe=lambda probed, plan: trl.probe_request(probed, task, plan),
            ),
        )
        started.append(executor)
        return executor.open(candidate).measure(candidate, PLAN)

    yield measure
    for executor in started:
        executor.close()


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("sharding", KINDS)
def test_a_sharded_model_is_measured(
    sharding: str,
    tuning: str,
    measured: Any,
) -> None:
    sharded_task = task(tuning)
    measurement: Measurement = measured(sharded_task, candidate(sharded_task, sharding=sharding))
    assert measurement.outcome is Outcome.OK, measurement.failure
    assert measurement.worst is not None
    assert measurement.worst.cycle_loss_tokens == (RANKS * 4 * 8,)
    assert measurement.memory.peak_bytes is not None
    effective: Mapping[str, Any] = measurement.effective
    assert effective["world_size"] == RANKS
    assert effective["distributed_type"] == ("FSDP" if sharding == "fsdp2" else "DEEPSPEED")
    share = effective["parameters_on_this_rank"] / effective["parameters"]
    assert share == pytest.approx(1.0) if sharding == "zero2" else 0.5 <= share < 0.6
    check_what_the_ranks_hold(measurement, sharding, tuning)


def check_what_the_ranks_hold(
    measurement: Measurement,
    sharding: str,
    tuning: str,
) -> None:
    """Check the bytes of weights, adapters and optimizer states (Adam's two, and masters) per
    rank.
    """
    effective: Mapping[str, Any] = measurement.effective
    assert [model.rank for model in measurement.memory.models] == [0, 1]
    trained = 4 * effective["trainable_parameters"]
    for model in measurement.memory.models:
        weight_bytes = model.bytes["weights"] + model.bytes.get("adapters", 0)
        assert weight_bytes == pytest.approx(
            4 * effective["parameters"] / (1 if sharding == "zero2" else RANKS), rel=0.25
        )
        assert 0.9 * trained <= model.bytes["optimizer"] <= 2 * trained  # shards need not be even
        assert ("adapters" in model.bytes) is (tuning == "lora")


def test_a_rank_has_the_environment_of_accelerate(tmp_path: Path) -> None:
    """Variables come from accelerate's own launcher, which reads the file of the final run."""
    from tests.worker.drive import inside

    sharded_task = task("full")
    zero3_candidate = candidate(sharded_task, sharding="zero3", offload_optimizer_device="cpu")
    request = trainer("trl").load_request(zero3_candidate, sharded_task)
    environment = inside("trl.rank_environment").environment_of(
        request["launch"]["accelerate"], tmp_path
    )  # type: ignore[index]
    assert environment["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS"} & set(environment)
