"""Settings that are said to decide no allocation, in traced steps of TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from autotune.core.trace import Trace
from autotune.estimate.screening.step_model import phase_peaks
from autotune.prediction.opening import open_tracers
from autotune.prediction.service import PredictionService
from autotune.request.flags import flags_of
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import read_sources

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("light_environment")]

LAYERS = 2
FEW_NUMBERS = 1e-5  # of a peak: numbers of rows and tokens next to logits

Settings = Mapping[str, Any]
TraceSettings = Callable[..., Trace]

LINEAR = ["down_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]
EVERY_PROJECTION = {"lora_target_modules": "all-linear"}


@pytest.fixture(name="traced", scope="module")
def one_tracer() -> Iterator[TraceSettings]:
    """Trace a GRPO step of two layers of Qwen2.5-0.5B with these settings."""
    pools = []

    def trace(settings: Settings, targets: list[str] | None = None) -> Trace:
        options = {"model": "Qwen2.5-0.5B", "gpus": "2xA100-40G", "tuning": "lora"}
        flags = flags_of({**options, "hold": settings})
        parsed = read_sources(flags, mode="predict").parse(limit_prompts=True)
        job = parsed.job
        if not pools:
            pools.append(open_tracers(job.task, parsed.trainer))
        service = PredictionService(
            task=job.task,
            trainer=parsed.trainer,
            limit_bytes=job.memory_limit_bytes,
            tracer=pools[0],
        )
        request = dict(service.request(candidate_of_job(parsed)))
        request["model"] = {**request["model"], "layers": LAYERS}
        if targets is not None:
            request["adapter"] = {**request["adapter"], "lora_target_modules": targets}
        trace: Trace = pools[0].trace(request)
        return trace

    yield trace
    for pool in pools:
        pool.close()


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({}, {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1}),
        ({}, {"weight_decay": 0.1, "max_grad_norm": 0.5, "epsilon_high": 0.28}),
        (
            {},
            {
                "lr_scheduler_type": "cosine_with_min_lr",
                "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            },
        ),
        ({}, {"mask_truncated_completions": True, "lora_dropout": 0.1}),
        ({"beta": 0.04}, {"beta": 0.001}),
        ({}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
    ],
    ids=str,
)
def test_the_same_allocations_are_made(
    settings: Settings,
    changed: Settings,
    traced: TraceSettings,
) -> None:
    trace = traced(settings)
    changed_trace = traced(changed)
    assert sorted(changed_trace.sizes) == sorted(trace.sizes)
    assert phase_peaks(changed_trace) == phase_peaks(trace)


@pytest.mark.parametrize(
    ("settings", "targets"),
    [(EVERY_PROJECTION, LINEAR), ({}, ["v_proj", "q_proj"])],
    ids=["all-linear", "the library's own"],
)
def test_targets_may_be_listed(
    settings: Settings,
    targets: list[str],
    traced: TraceSettings,
) -> None:
    trace = traced(settings)
    listed = traced({}, targets)
    assert sorted(listed.sizes) == sorted(trace.sizes)
    assert phase_peaks(listed) == phase_peaks(trace)


@pytest.mark.parametrize(
    "settings",
    [
        {"scale_rewards": False},
        {"importance_sampling_level": "sequence"},
        {"loss_type": "grpo"},
        {"loss_type": "bnpo"},
        {"loss_type": "dr_grpo"},
    ],
    ids=str,
)
def test_the_peaks_differ_by_a_few_numbers(settings: Settings, traced: TraceSettings) -> None:
    peaks = phase_peaks(traced({}))
    changed = phase_peaks(traced(settings))
    assert changed == pytest.approx(peaks, rel=FEW_NUMBERS)


def test_a_reference_needs_more(traced: TraceSettings) -> None:
    """The tests above would notice another step."""
    assert sum(traced({"beta": 0.04}).sizes) > sum(traced({}).sizes)
