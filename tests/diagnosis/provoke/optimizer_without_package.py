"""An optimizer whose package is not installed."""

from __future__ import annotations

from parts import sft

sft(optim="galore_adamw", optim_target_modules=["mlp"])
