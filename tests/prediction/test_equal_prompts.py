"""Prompts of one length need no attention mask in a rollout; those of a training differ."""

from __future__ import annotations

import math
from dataclasses import replace

from autotune.core.dataset import TokenLengths
from autotune.core.job import Job
from autotune.core.units import GIB
from autotune.prediction.service import open_prediction_service
from autotune.request.flags import flags_of
from autotune.request.job_builder import ParsedRequest, candidate_of_job
from autotune.request.request_parser import read_sources

PROMPT = 8_000
ROWS = 64


def rollout_bytes(request: ParsedRequest, job: Job) -> float:
    """Return what torch allocates at most while prompts are read."""
    service = open_prediction_service(job, request.trainer, traces=False)
    prediction = service.predict(candidate_of_job(request))
    rollout = next(phase for phase in prediction.phases if phase.name == "rollout")
    return math.fsum(rollout.parts.values())


def with_prompts(job: Job, lengths: TokenLengths) -> Job:
    workload = replace(job.task.workload, prompt_lengths=lengths)
    return replace(job, task=replace(job.task, workload=workload))


def test_unknown_and_different_prompts_have_the_mask_that_equal_ones_lack() -> None:
    flags = flags_of(
        {
            "model": "Qwen2.5-0.5B",
            "gpus": "H100",
            "hold": ("use_vllm=false",),
            "max_prompt_length": PROMPT,
            "max_completion_length": 64,
            "global_batch": ROWS,
        }
    )
    request = read_sources(flags, mode="predict").parse(limit_prompts=True)
    unknown = rollout_bytes(request, request.job)
    different = with_prompts(request.job, TokenLengths.of("file", [10, PROMPT]))
    equal = with_prompts(request.job, TokenLengths.of("file", [PROMPT]))
    assert rollout_bytes(request, different) == unknown
    # At least a byte for each pair of tokens of a row.
    assert unknown - rollout_bytes(request, equal) > ROWS * PROMPT**2 - GIB
