"""ZeRO-2 on two ranks, without a fault."""

from __future__ import annotations

from parts import on_gloo, plain_trainer, zero

on_gloo()
plain_trainer(deepspeed=zero(2))
