"""A group of one."""

from __future__ import annotations

from parts import grpo

grpo(num_generations=1)
