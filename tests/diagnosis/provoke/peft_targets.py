"""An adapter for layers that the model does not have."""

from __future__ import annotations

from parts import sft
from peft import LoraConfig

sft(trainer={"peft_config": LoraConfig(target_modules=["c_attn"])})
