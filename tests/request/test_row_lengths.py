"""What the rows of a dataset say about a training step."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.core.dataset import LengthPercentile, RowLengths
from autotune.request.measured_data import with_row_lengths
from tests.estimate.test_throughput import prediction_input
from tests.simulated import ToyTrainer, toy_job, toy_request, toy_space


def percentile(share: int, length: int) -> LengthPercentile:
    return LengthPercentile(
        share=share,
        length=length,
        longer=0,
        cut=0,
        left_out=0,
    )


def test_the_middle_row_is_kept_with_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = RowLengths(
        rows=4,
        looked_at=4,
        tokens=2000,
        percentiles=(percentile(50, 300), percentile(100, 900)),
    )
    trainer = ToyTrainer()
    request = toy_request(toy_job(tmp_path, toy_space(), 2**30), trainer)
    assert with_row_lengths(request).job.task.workload.median_row is None

    monkeypatch.setattr(trainer, "row_lengths", lambda task: lengths)
    request = with_row_lengths(request)
    assert request.job.task.workload.median_row == 300
    assert request.job.data == lengths


@pytest.mark.parametrize(("median_row", "answer"), [(None, None), (1535, True), (1536, False)])
def test_rows_differ_where_half_of_them_are_shorter(
    median_row: int | None, answer: bool | None
) -> None:
    assert prediction_input(median_row=median_row).rows_differ is answer
