"""A reward whose judge answers what is no JSON."""

from __future__ import annotations

import json

from parts import grpo


def reward(completions, **_):
    return [json.loads("Sorry, I can not rate this.")["score"] for _ in completions]


grpo(reward=reward)
