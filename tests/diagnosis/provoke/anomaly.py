"""A backward pass that meets what is no number."""

from __future__ import annotations

import torch

torch.autograd.set_detect_anomaly(True)
weights = torch.zeros(4, requires_grad=True)
for step in range(3):
    (weights.sqrt() * 0).sum().backward()
    print({"loss": 0.0, "step": step})
