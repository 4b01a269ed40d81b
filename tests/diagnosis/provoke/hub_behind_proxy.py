"""A hub behind a proxy that does not answer."""

from __future__ import annotations

from parts import grpo

grpo(model="Qwen/Qwen2.5-0.5B-Instruct")
