"""A model of the hub that is not in the cache, offline."""

from __future__ import annotations

from parts import grpo

grpo(model="Qwen/Qwen2.5-0.5B-Instruct")
