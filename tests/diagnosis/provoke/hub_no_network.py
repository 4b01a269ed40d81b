"""A model of the hub, on a machine without a network."""

from __future__ import annotations

from parts import grpo

grpo(model="Qwen/Qwen2.5-0.5B-Instruct")
