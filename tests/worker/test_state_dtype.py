"""Precision of the optimizer's states, read from real optimizers after a step."""

from __future__ import annotations

import pytest
import torch

from autotune.worker.trl.trainer_settings import _state_dtype


def after_a_step(
    kind: type[torch.optim.Optimizer],
    dtype: torch.dtype,
    **options: float,
) -> torch.optim.Optimizer:
    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = kind([parameter], **options)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float32, "float32")]
)
def test_adams_moments_have_the_precision_of_the_weights(dtype: torch.dtype, name: str) -> None:
    optimizer = after_a_step(torch.optim.AdamW, dtype, lr=0.1)
    assert _state_dtype(optimizer) == name


def test_the_counter_of_steps_is_no_state_that_counts() -> None:
    # Its step is a float32 number without dimensions, beside moments in bfloat16.
    optimizer = after_a_step(torch.optim.AdamW, torch.bfloat16, lr=0.1)
    (state,) = optimizer.state.values()
    assert state["step"].dtype is torch.float32 and _state_dtype(optimizer) == "bfloat16"


def test_an_optimizer_without_state_has_none() -> None:
    optimizer = after_a_step(torch.optim.SGD, torch.float32, lr=0.1)
    assert _state_dtype(optimizer) is None
