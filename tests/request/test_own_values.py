"""A configuration's own numbers are candidates, also where they lie between those of the space."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.request.flags import Flags
from autotune.request.job_builder import ParsedRequest
from autotune.request.request_parser import parse_request
from autotune.search.loop import baseline_candidate, legal_candidates

FILE = """\
model_name_or_path: Qwen/Qwen2.5-0.5B
use_peft: true
use_vllm: true
vllm_mode: colocate
vllm_gpu_memory_utilization: 0.62
per_device_train_batch_size: 12
gradient_accumulation_steps: 2
num_generations: 4
"""


def request_with(tmp_path: Path, **flags: Any) -> ParsedRequest:
    file = tmp_path / "train.yaml"
    file.write_text(FILE)
    return parse_request(
        Flags(
            config=str(file),
            gpus="A100-40G",
            mode="predict",
            **flags,
        )
    )


def test_the_baseline_is_a_candidate(tmp_path: Path) -> None:
    request = request_with(tmp_path)
    baseline = baseline_candidate(request.job, request.trainer)
    assert baseline is not None and baseline.settings["vllm_gpu_memory_utilization"] == 0.62
    assert baseline in legal_candidates(request.job, request.trainer)


@pytest.mark.parametrize(
    ("name", "value"), [("vllm_gpu_memory_utilization", 0.62), ("per_device_train_batch_size", 12)]
)
def test_its_numbers_take_their_place_in_the_order_of_memory(
    tmp_path: Path,
    name: str,
    value: float,
) -> None:
    choices = request_with(tmp_path).job.space[name].choices
    assert value in choices and list(choices) == sorted(choices) and len(choices) > 2


def test_what_is_searched_by_name_is_searched_alone(tmp_path: Path) -> None:
    request = request_with(tmp_path, search=("vllm_gpu_memory_utilization=0.3,0.5",))
    assert request.job.space["vllm_gpu_memory_utilization"].choices == (0.3, 0.5)
