"""A loss that does not exist."""

from __future__ import annotations

from parts import grpo

grpo(loss_type="ppo")
