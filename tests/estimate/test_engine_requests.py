"""Host's work for each running sequence of an engine: beside the device's step, or after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.catalog import efficiency
from autotune.estimate.throughput import generation
from autotune.estimate.throughput.generation import GenerationLoad
from tests.estimate.synthetic import config_of, gpu_of

H100 = gpu_of("H100")

SMALL = GenerationLoad(
    config=config_of("Qwen/Qwen2.5-0.5B"),
    dtype="bfloat16",
    sequences=512,
    prompts=64,
    prompt_length=128,
    completion_length=128,
    batch=512,
    by_engine=True,
)


def step_seconds(load: GenerationLoad, together: int) -> float:
    return generation.one_pass(load, H100, together=together, length=192).value


def test_the_first_engine_takes_a_quarter_of_a_millisecond_for_each_sequence() -> None:
    """200 more sequences: 50 ms, and what the device takes for them."""
    old = replace(SMALL, vllm=(0, 8))
    added = step_seconds(old, 300) - step_seconds(old, 100)
    assert added == pytest.approx(0.050, rel=0.05)


def test_a_host_that_schedules_ahead_is_hidden_behind_a_longer_step() -> None:
    large = replace(SMALL, config=config_of("Qwen/Qwen2.5-7B"))
    ahead, after = replace(large, vllm=(0, 14)), replace(large, vllm=(0, 13))
    requests = 32 * efficiency("engine_sequence_microseconds").value * 1e-6
    difference = step_seconds(after, 32) - step_seconds(ahead, 32)
    assert difference == pytest.approx(requests)


def test_a_small_model_waits_for_the_host_even_so() -> None:
    """512 sequences of 30 microseconds and the step's 1.2 ms, where the device takes less."""
    assert step_seconds(replace(SMALL, vllm=(0, 26)), 512) == pytest.approx(
        512 * 30e-6 + 1.2e-3, rel=0.01
    )
