"""Prompts that are numbers."""

from __future__ import annotations

from parts import grpo, rows

grpo(data=rows(prompt=4))
