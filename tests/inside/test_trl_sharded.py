"""Probes of a model that is spread over two gloo ranks: DeepSpeed and FSDP2 as accelerate launches them, under a real keeper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autotune.candidate import Candidate
from autotune.executors.local import LocalExecutor
from autotune.inside.made_up import tiny_config
from autotune.measurement import Measurement, Outcome
from autotune.trainers import trainer
from autotune.trainers.base import Job, ProbePlan
from autotune.workload import Model
from tests.trainers.conftest import make_job

ADAPTER = Path(__file__).with_name("gloo_as_gpus.py")
RANKS = 2
PLAN = ProbePlan(optimizer_steps=2, warmup_cycles=1, timed_cycles=1, deadline_seconds=240)
SMALL = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": 4, "max_prompt_length": 16,
    "max_completion_length": 8,
}  # fmt: skip

pytestmark = pytest.mark.slow
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
KINDS = ["fsdp2", *(pytest.param(kind, marks=needs_deepspeed) for kind in ("zero2", "zero3"))]


def job(tuning: str) -> Job:
    made = make_job(RANKS, tuning=tuning)
    model = Model(name="tiny", config=tiny_config(vocab=512, layers=2, hidden=512), folder=None, origin="made up")
    return replace(made, workload=replace(made.workload, model=model))


def candidate(asked: Job, **knobs: Any) -> Candidate:
    return trainer("trl").complete({**SMALL, **knobs}, asked)


@pytest.fixture
def measured(tmp_path: Path) -> Iterator[Any]:
    started: list[LocalExecutor] = []

    def measure(asked: Job, one: Candidate, limit: int = 6 * 2**30) -> Measurement:
        trl = trainer("trl")
        executor = LocalExecutor(
            python=asked.workload.python, adapter=str(ADAPTER), ranks=RANKS, limit_bytes=limit, scratch_root=tmp_path,
            load_request=lambda each: trl.load_request(each, asked),
            probe_request=lambda each, plan: trl.probe_request(each, asked, plan),
        )  # fmt: skip
        started.append(executor)
        return executor.open(one).measure(one, PLAN)

    yield measure
    for executor in started:
        executor.close()


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("sharding", KINDS)
def test_a_spread_model_is_measured(sharding: str, tuning: str, measured: Any) -> None:
    asked = job(tuning)
    found: Measurement = measured(asked, candidate(asked, sharding=sharding))
    assert found.outcome is Outcome.OK, found.failure
    assert found.worst is not None and found.worst.cycle_loss_tokens == (RANKS * 4 * 8,)
    assert found.memory.peak_bytes is not None
    effective: Mapping[str, Any] = found.effective
    assert effective["world_size"] == RANKS
    assert effective["distributed_type"] == ("FSDP" if sharding == "fsdp2" else "DEEPSPEED")
    share = effective["parameters_on_this_rank"] / effective["parameters"]
    assert share == pytest.approx(1.0) if sharding == "zero2" else 0.5 <= share < 0.6
    check_what_the_ranks_hold(found, sharding, tuning)


def check_what_the_ranks_hold(found: Measurement, sharding: str, tuning: str) -> None:
    """Two states of Adam for a trained weight, and where DeepSpeed keeps masters, these: cut in two by every one of the kinds."""
    effective: Mapping[str, Any] = found.effective
    assert [one.rank for one in found.memory.models] == [0, 1]
    trained = 4 * effective["trainable_parameters"]
    for one in found.memory.models:
        kept = one.bytes["weights"] + one.bytes.get("adapters", 0)
        assert kept == pytest.approx(4 * effective["parameters"] / (1 if sharding == "zero2" else RANKS), rel=0.25)
        assert 0.9 * trained <= one.bytes["optimizer"] <= 2 * trained  # shards need not be even
        assert ("adapters" in one.bytes) is (tuning == "lora")


def test_the_rank_says_what_accelerate_would_have_set(tmp_path: Path) -> None:
    """The environment comes out of accelerate's own launcher, reading the file that is written for the final run."""
    from tests.inside.drive import inside

    asked = job("full")
    one = candidate(asked, sharding="zero3", offload_optimizer_device="cpu")
    request = trainer("trl").load_request(one, asked)
    made = inside("adapters.trl_launch").environment_of(request["launch"]["accelerate"], tmp_path)  # type: ignore[index]
    assert made["ACCELERATE_USE_DEEPSPEED"] == "true" and made["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
    assert made["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "cpu"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS"} & set(made)
