"""GRPO on a CPU under a memory limit."""

from __future__ import annotations

from parts import grpo

grpo(
    per_device_train_batch_size=2048,
    num_generations=2048,
    max_completion_length=64,
)
