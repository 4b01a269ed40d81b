"""Examples of different lengths, and nothing that pads them."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

examples = [torch.ones(length) for length in range(3, 40)]
for step, batch in enumerate(DataLoader(examples, batch_size=4)):
    print({"loss": batch.mean().item(), "step": step})
