"""An adapter of rank 0."""

from __future__ import annotations

from parts import sft
from peft import LoraConfig

sft(trainer={"peft_config": LoraConfig(r=0)})
