"""Logging every 0 steps."""

from __future__ import annotations

from parts import plain_trainer

plain_trainer(logging_strategy="steps", logging_steps=0)
