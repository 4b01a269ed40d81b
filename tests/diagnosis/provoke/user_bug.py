"""A mistake in the user's own reward."""

from __future__ import annotations

from parts import grpo


def reward(completions, **columns):
    return [columns["answer"][0] for _ in completions]


grpo(reward=reward)
