"""bf16 where the machine has none."""

from __future__ import annotations

from parts import grpo

grpo(bf16=True, use_cpu=False)
