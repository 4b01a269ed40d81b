"""The time for which training waits for engines on GPUs of their own."""

from __future__ import annotations

import pytest

from autotune import catalog
from autotune.core.composition import EngineSettings, SplitEngines
from autotune.core.measurement import Phase
from autotune.core.prediction import Estimate
from autotune.estimate.throughput.generation import GenerationLoad
from autotune.estimate.throughput.rollout_simulation import overlapped, rollout_seconds
from tests.estimate.synthetic import CONFIG

A100 = next(gpu for gpu in catalog.gpus() if gpu.name == "A100-40G")
ENGINE = EngineSettings(
    utilization=0.9,
    max_model_length=1024,
    max_num_seqs=8,
)
SPLIT = SplitEngines(
    gpus=1,
    engine=ENGINE,
    dtype="bfloat16",
    overlap="batch",
)
LOAD = GenerationLoad(
    config=CONFIG,
    dtype="bfloat16",
    sequences=8,
    prompts=8,
    prompt_length=64,
    completion_length=64,
    batch=8,
    by_engine=True,
)


def test_a_wait_has_an_interval_whatever_the_error_of_the_training() -> None:
    """One batch ahead, training of t seconds waits max(0, g - t). With t = 0.9 g, and between 0 and
    g, the difference of the lower ends is the lower end of g: more than the wait of 0.1 g.
    """
    generated = rollout_seconds(LOAD, ENGINE, None, None, A100)
    training = Estimate(
        value=generated.value * 0.9,
        low=0.0,
        high=generated.value,
    )
    seconds: dict[Phase, Estimate] = {"forward": training}
    phases, times = overlapped(
        seconds,
        SPLIT,
        LOAD,
        None,
        None,
        A100,
        optimizer_steps=1,
    )
    assert times.generation == generated
    wait = phases["rollout"]
    assert wait.value == pytest.approx(generated.value * 0.1)
    assert wait.low <= wait.value <= wait.high
