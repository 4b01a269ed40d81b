"""A ZeRO stage that does not exist."""

from __future__ import annotations

from parts import on_gloo, plain_trainer, zero

on_gloo()
plain_trainer(deepspeed=zero(5))
