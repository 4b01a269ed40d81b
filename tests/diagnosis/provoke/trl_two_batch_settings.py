"""Two settings with the same meaning."""

from __future__ import annotations

from parts import grpo

grpo(generation_batch_size=4, steps_per_generation=2)
