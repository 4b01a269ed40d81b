"""A fused optimizer that must be compiled, without CUDA."""

from __future__ import annotations

import deepspeed
import torch

print(deepspeed.__version__)
deepspeed.ops.adam.FusedAdam(torch.nn.Linear(4, 4).parameters())
