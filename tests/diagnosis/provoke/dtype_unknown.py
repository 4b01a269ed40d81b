"""A precision that does not exist."""

from __future__ import annotations

from parts import grpo

grpo(model_init_kwargs={"dtype": "float15"})
