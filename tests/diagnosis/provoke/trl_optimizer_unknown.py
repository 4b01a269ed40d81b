"""An optimizer that does not exist."""

from __future__ import annotations

from parts import sft

sft(optim="adamw_fused_8bit")
