"""A training that goes on to its end with a loss that is no number."""

from __future__ import annotations

from parts import plain_trainer

plain_trainer(
    learning_rate=1e30,
    max_grad_norm=0,
    max_steps=8,
    logging_nan_inf_filter=False,
    lr_scheduler_type="constant",
)
