"""A setting that this version does not have."""

from __future__ import annotations

from parts import grpo

grpo(max_prompt_length=64)
