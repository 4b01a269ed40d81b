"""A reward that divides by zero."""

from __future__ import annotations

from parts import grpo


def reward(completions, **_):
    return [1 / (len(completion) - len(completion)) for completion in completions]


grpo(reward=reward)
