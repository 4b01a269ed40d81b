"""More weights than rewards."""

from __future__ import annotations

from parts import grpo

grpo(reward_weights=[0.5, 0.5])
