"""Prefix tuning together with checkpointing."""

from __future__ import annotations

from parts import sft
from peft import PrefixTuningConfig

sft(
    gradient_checkpointing=True,
    trainer={"peft_config": PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")},
)
