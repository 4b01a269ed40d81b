"""A reward that returns what cannot be summed."""

from __future__ import annotations

from parts import grpo


def reward(completions, **_):
    return [{"score": 1.0}["points"] if not text else text + 1 for text in completions]


grpo(reward=reward)
