"""The settings line of a prediction has what decides memory for its framework."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from autotune.report.prediction_text import show_basis
from autotune.request.job_builder import candidate_of_job
from tests.report.test_forecast import PREDICTION
from tests.request.test_unset_variables import MICRO_BATCH, SWIFT, VERL, request_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{SWIFT} --num_generations 8 --max_length 1024\n",
            ("use_vllm=false", "max_length=1024", "max_completion_length=512"),
        ),
        (
            f"{VERL} {MICRO_BATCH}=2 actor_rollout_ref.actor.fsdp_config.param_offload=True\n",
            (
                "fsdp_config.param_offload=true",
                "tensor_model_parallel_size=2",
                "data.max_prompt_length=512",
                "data.max_response_length=512",
            ),
        ),
    ],
)
def test_a_reader_can_check_the_reading(
    text: str,
    expected: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    request = request_of(tmp_path, text)
    show_basis(
        Console(width=2000, highlight=False),
        request.job,
        candidate_of_job(request),
        PREDICTION,
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("settings")]
    for setting in expected:
        assert setting in line, setting
