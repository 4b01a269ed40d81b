"""A DeepSpeed configuration that contradicts the trainer's."""

from __future__ import annotations

from parts import on_gloo, plain_trainer, zero

on_gloo()
plain_trainer(deepspeed=zero(2, train_micro_batch_size_per_gpu=16))
