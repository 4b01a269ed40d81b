"""A kernel that reads where nothing is."""

from __future__ import annotations

import torch
from parts import fail_at, plain_trainer

message = "CUDA error: an illegal memory access was encountered\n"
message += "CUDA kernel errors might be asynchronously reported at some other call."
fail_at("torch.optim.adamw:AdamW.step", torch.AcceleratorError(message), call=2)
plain_trainer(optim="adamw_torch")
