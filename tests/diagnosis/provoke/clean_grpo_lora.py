"""GRPO with an adapter, without a fault."""

from __future__ import annotations

from parts import grpo
from peft import LoraConfig

grpo(trainer={"peft_config": LoraConfig(target_modules=["q_proj"])})
