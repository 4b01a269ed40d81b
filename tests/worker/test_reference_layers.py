"""Work of a reference model: what grows with its depth is counted in its layers."""

from __future__ import annotations

import msgspec
import pytest

from autotune.core.trace import Trace
from tests.counted_memory import cases

pytest.importorskip("trl")

from autotune.worker.trl import step_trace


@pytest.mark.slow
def test_a_reference_models_work_outside_of_its_layers_does_not_grow_with_them() -> None:
    step_trace.warm({"model": {"config": {"model_type": "qwen2"}}})
    outside = []
    for layers in (1, 3):
        spec = cases.spec(beta=0.04)  # full training: the reference is a model of its own
        model = {**spec["model"], "layers": layers}
        trace = msgspec.convert(step_trace.trace({**spec, "model": model}), Trace)
        (score,) = [work for work in trace.work if work.phase == "score"]
        in_layers = sum(score.in_layers.get(dtype, 0.0) for dtype in score.flops)
        assert in_layers > 0
        outside.append(sum(score.flops.values()) - in_layers)
    assert outside[0] == outside[1]
