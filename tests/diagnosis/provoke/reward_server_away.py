"""A reward that calls a server that is not running."""

from __future__ import annotations

import requests
from parts import grpo


def reward(completions, **_):
    return [
        requests.post("http://127.0.0.1:9/score", json={"text": text}, timeout=5).json()["score"]
        for text in completions
    ]


grpo(reward=reward)
