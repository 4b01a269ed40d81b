"""Models whose operations follow no formula: they order a screening, and give no single answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.core.trace import Trace, Work
from autotune.estimate.screening import Point, point_of, repetition_of
from autotune.prediction.surveys import MAX_OPERATIONS_ERROR, Surveys
from tests.estimate.test_step_model import step
from tests.prediction.test_step_models import models, request

LAYERS = 8
REPETITION = repetition_of({"num_hidden_layers": LAYERS})


class Tracers:
    """Traces of a synthetic step; its operations follow a formula, or none."""

    def __init__(self, *, regular: bool) -> None:
        self.regular = regular
        self.traced = 0

    def expect(self, specifications: Any) -> None:
        pass

    def trace(self, specification: Any, *, until: float) -> Trace:
        self.traced += 1
        point = point_of(specification)
        layers = specification["model"]["layers"] or LAYERS
        operations = 1e9 * point.micro_batch * (point.prompt + point.completion)
        if not self.regular:
            operations *= 1 + 0.3 * (self.traced % 3)
        work = Work(
            phase="forward",
            moved_bytes=0.0,
            kernels=1,
            flops={"bfloat16": operations},
        )
        return replace(step(point, layers), work=(work,))


@pytest.mark.parametrize("regular", [True, False])
def test_only_an_exact_model_of_the_operations_is_kept(tmp_path: Path, regular: bool) -> None:
    store = models(tmp_path)
    surveys = Surveys(Tracers(regular=regular), store)  # type: ignore[arg-type]
    surveys.model_at(request(settings={"gradient_accumulation_steps": 8}), REPETITION)
    surveyed = surveys.model_at(request(), REPETITION)  # a second point: the family is surveyed

    assert (surveyed is not None) is regular
    # A later command neither takes the model for exact, nor surveys the family again.
    assert (store.model_of(request(), [point_of(request())]) is not None) is regular
    assert store.is_refused(request()) is not regular


@pytest.mark.parametrize(
    ("operations_error", "residual", "serves"),
    [(0.0, 0.0, True), (2 * MAX_OPERATIONS_ERROR, 0.0, False), (0.0, 0.012, False)],
)
def test_the_model_of_a_screening_serves_one_candidate_only_if_exact(
    operations_error: float, residual: float, serves: bool
) -> None:
    surveys = Surveys(Tracers(regular=True))  # type: ignore[arg-type]
    points = [Point(1, 64, 64, 4), Point(8, 512, 512, 4)]
    model = SimpleNamespace(operations_error=operations_error, residual=residual)
    family = SimpleNamespace(points=points, model=model)
    surveys.families["family"] = family  # type: ignore[assignment]
    assert surveys.covers("family", Point(2, 128, 128, 4)) is serves
