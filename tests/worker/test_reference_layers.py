"""A reference model's layers are layers: its work is counted in them, and its pass grows with their
number as the trained model's does.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from autotune.core.trace import Trace
from autotune.estimate.screening import repetition_of
from autotune.estimate.screening.step_model import phase_peaks
from autotune.estimate.screening.stretching import stretched
from tests.counted_memory import cases

pytest.importorskip("trl")

from autotune.worker.trl import step_trace

DEEP = {**cases.WIDE, "num_hidden_layers": 9}


def traced(spec: dict[str, Any], layers: int) -> Trace:
    step_trace.warm({"model": {"config": {"model_type": "qwen2"}}})
    model = {**spec["model"], "layers": layers}
    return msgspec.convert(step_trace.trace({**spec, "model": model}), Trace)


@pytest.mark.slow
def test_a_reference_models_work_outside_of_its_layers_does_not_grow_with_them() -> None:
    outside = []
    for layers in (1, 3):
        # Full training: the reference is a model of its own.
        trace = traced(cases.spec(beta=0.04), layers)
        (score,) = [work for work in trace.work if work.phase == "score"]
        in_layers = sum(score.in_layers.get(dtype, 0.0) for dtype in score.flops)
        assert in_layers > 0
        outside.append(sum(score.flops.values()) - in_layers)
    assert outside[0] == outside[1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_references_pass_at_full_depth_follows_from_two_short_models(method: str) -> None:
    spec = cases.spec(method, config=DEEP, beta=0.04)
    repetition = repetition_of(DEEP)
    assert repetition is not None
    short = traced(spec, repetition.layers)
    longer = traced(spec, repetition.layers + repetition.period)
    full = traced(spec, DEEP["num_hidden_layers"])

    model = stretched(short, longer, repetition)

    assert phase_peaks(model.trace) == phase_peaks(full)
    assert model.trace.layers == full.layers
