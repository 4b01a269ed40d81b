"""A model's name that no hub could have."""

from __future__ import annotations

from parts import grpo

grpo(model="Qwen/Qwen2.5/0.5B Instruct")
