"""A DeepSpeed configuration that offloads to nowhere."""

from __future__ import annotations

from parts import on_gloo, plain_trainer, zero

on_gloo()
config = zero(2)
config["zero_optimization"]["offload_optimizer"] = {"device": "disk"}
plain_trainer(deepspeed=config)
