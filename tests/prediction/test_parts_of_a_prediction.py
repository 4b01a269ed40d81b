"""What shows without a whole prediction that a candidate does not fit: never what does fit."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from autotune.core.errors import CannotPredict
from autotune.estimate.replay import StepStage
from autotune.prediction import single_predictions
from autotune.prediction.service import PredictionService, open_prediction_service
from autotune.request.flags import flags_of
from autotune.request.job_builder import candidate_of_job
from autotune.request.request_parser import ParsedRequest, read_sources

KNOBS = {
    "max_completion_length": (64, 512, 1024, 3072),
    "gradient_checkpointing": (True, False),
    "PYTORCH_CUDA_ALLOC_CONF": (None, "expandable_segments:True"),
    "use_vllm": (False, True),
}
SHARES = {
    "use_vllm": (True,),
    "vllm_enable_sleep_mode": (False, True),
    "vllm_gpu_memory_utilization": (0.2, 0.45, 0.7, 0.95),
    "per_device_train_batch_size": (1, 8),
}
MAX_SPLIT = {
    "PYTORCH_CUDA_ALLOC_CONF": ("max_split_size_mb:64",),
    "max_completion_length": (512, 1024, 2048, 4096, 8192),
}
Choices = Mapping[str, tuple[object, ...]]


def request_of(flags: Mapping[str, Any]) -> ParsedRequest:
    return read_sources(flags_of(flags), mode="predict").parse(limit_prompts=True)


@pytest.mark.parametrize(
    ("model", "gpus", "choices"),
    [
        ("Qwen2.5-7B", "A100-40G", KNOBS),
        ("Qwen2.5-7B", "A100-40G", SHARES),
        ("Qwen2.5-7B", "A100-40G", MAX_SPLIT),
        ("Qwen2.5-1.5B", "2xRTX4090", SHARES),
        ("Qwen2.5-14B", "A100-80G", KNOBS),
    ],
)
def test_what_is_refused_early_does_not_fit(model: str, gpus: str, choices: Choices) -> None:
    request = request_of({"model": model, "gpus": gpus})
    base = candidate_of_job(request)
    answers: Counter[tuple[bool, bool, bool]] = Counter()
    service = open_prediction_service(request.job, request.trainer, traces=False)
    exact = open_prediction_service(request.job, request.trainer, traces=False)
    with contextlib.closing(service), contextlib.closing(exact):
        exact.predict(base)
        service.predict(base)
        for values in itertools.product(*choices.values()):
            changed = {**base.knobs, **dict(zip(choices, values, strict=True))}
            knobs = request.whole_space.with_remedies(changed)
            candidate = request.trainer.complete(knobs, request.job.task)
            try:
                fits = exact.predict(candidate).fits is True
            except CannotPredict:  # no step model is shipped
                continue
            requests = service.requests_may_fit(candidate)
            replay = service.may_fit(candidate)
            answers[requests, replay, fits] += 1

    for requests, replay, fits in answers:
        assert requests >= replay >= fits
    assert len({fits for *_, fits in answers}) == 2
    early = sum(count for (requests, replay, _), count in answers.items() if not replay)
    late = sum(count for (_, replay, fits), count in answers.items() if replay and not fits)
    assert early > 3 * late


def test_a_speed_needs_no_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    request = request_of({"model": "Qwen2.5-7B", "gpus": "H100", "tuning": "full"})
    base = candidate_of_job(request)
    exact = open_prediction_service(request.job, request.trainer, traces=False)
    service = open_prediction_service(request.job, request.trainer, traces=False)
    with contextlib.closing(service), contextlib.closing(exact):
        rates = {}
        for size in (1, 2, 8):
            knobs = {
                **base.knobs,
                "per_device_train_batch_size": size,
                "gradient_accumulation_steps": 64 // size,
            }
            candidate = request.trainer.complete(knobs, request.job.task)
            rates[size] = exact.predict(candidate).tokens_per_second
            with monkeypatch.context() as patches:
                patches.setattr(single_predictions, "memory", lambda *_: pytest.fail("whole"))
                assert service.rate_without_replay(candidate) == rates[size]
    assert len({rate.value for rate in rates.values() if rate}) == 3


@pytest.mark.parametrize("allocator", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_a_replay_up_to_a_limit_is_the_replay_without_one(allocator: str) -> None:
    flags: dict[str, Any] = {"model": "Qwen2.5-7B", "gpus": "A100-80G"}
    if allocator:
        flags["set"] = [f"PYTORCH_CUDA_ALLOC_CONF={allocator}"]
    request = request_of(flags)
    candidate = candidate_of_job(request)
    service = open_prediction_service(request.job, request.trainer, traces=False)
    with contextlib.closing(service):
        exact = fresh_stage(service, candidate)
        usage = exact.usage_as_traced()
        for reserved in (usage.reserved_bytes, usage.reserved_bytes + 1):
            assert fresh_stage(service, candidate).usage_up_to(reserved) == usage
        if "max_split" not in allocator:
            for reserved in (-1, usage.requested_bytes, usage.reserved_bytes - 1):
                assert fresh_stage(service, candidate).usage_up_to(reserved) is None
        assert fresh_stage(service, candidate).loaded_bytes() == usage.loaded_bytes > 0


def fresh_stage(service: PredictionService, candidate: Any) -> StepStage:
    """Return the step of a candidate without any replay so far."""
    step = service.modelled_step(candidate)
    assert step is not None
    inputs, stage = step
    fresh = stage.at(stage._sizes[: len(inputs.trace.sizes)], stage._context)
    assert fresh is not None
    return fresh


def test_a_refused_replay_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A 14B's requests are within 40 GB, and its blocks are not: none of its replays ends."""
    flags = {"model": "Qwen2.5-14B", "gpus": "2xA100-40G", "max_completion_length": 704}
    request = request_of(flags)
    candidate = candidate_of_job(request)
    service = open_prediction_service(request.job, request.trainer, traces=False)
    monkeypatch.setattr(single_predictions, "memory", lambda *_: pytest.fail("a whole prediction"))
    with contextlib.closing(service):
        assert service.requests_may_fit(candidate)
        stage = service.modelled_step(candidate)[1]  # type: ignore[index]
        assert not service.may_fit(candidate)
    assert stage._replays
    assert all(result.out_of_memory is not None for result in stage._replays.values())


def test_settings_that_allocate_nothing_share_a_family() -> None:
    request = request_of({"model": "Qwen2.5-7B", "gpus": "2xA100-80G"})
    base = candidate_of_job(request)
    service = open_prediction_service(request.job, request.trainer, traces=False)
    stages = []
    with contextlib.closing(service):
        for attention in (None, "sdpa", "eager"):
            knobs = {**base.knobs, "attn_implementation": attention}
            candidate = request.trainer.complete(knobs, request.job.task)
            step = service.modelled_step(candidate)
            assert step is not None
            stages.append(step[1])
        assert service.families == 3
    usual, same, eager = stages
    assert same is usual
    assert eager is not usual
