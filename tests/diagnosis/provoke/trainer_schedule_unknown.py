"""A schedule that does not exist."""

from __future__ import annotations

from parts import plain_trainer

plain_trainer(lr_scheduler_type="cosine_annealing")
