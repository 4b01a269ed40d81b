"""ZeRO-2 on two ranks, and a disk too small for their checkpoint."""

from __future__ import annotations

from parts import on_gloo, plain_trainer, zero

on_gloo()
plain_trainer(
    deepspeed=zero(2),
    save_strategy="steps",
    save_steps=2,
)
