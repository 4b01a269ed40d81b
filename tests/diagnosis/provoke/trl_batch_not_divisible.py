"""A generation batch that the completions of a prompt do not divide."""

from __future__ import annotations

from parts import grpo

grpo(num_generations=3)
