"""Fresh modules around the tensors of a loaded model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from autotune.worker.trl import base_model  # noqa: E402


@dataclasses.dataclass
class QuantState:
    """Scales of 4-bit weights, as bitsandbytes' modules hold them beside the parameter."""

    absmax: Any


def test_fresh_modules_share_all_tensors_also_scales_outside_the_parameters() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model[0].quant_state = QuantState(absmax=torch.ones(8))
    made = base_model.fresh(model)
    assert made[0] is not model[0]
    assert made[0].weight.data_ptr() == model[0].weight.data_ptr()
    assert made[0].quant_state.absmax.data_ptr() == model[0].quant_state.absmax.data_ptr()
