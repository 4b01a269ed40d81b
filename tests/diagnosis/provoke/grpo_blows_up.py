"""GRPO at a learning rate that ruins its weights."""

from __future__ import annotations

from parts import grpo

grpo(
    learning_rate=1e30,
    max_grad_norm=0.0,
    max_steps=12,
)
