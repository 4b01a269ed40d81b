"""Two ranks under a memory limit: the kernel ends the one that grows."""

from __future__ import annotations

import torch
from parts import loop, rank

tensors = []


def grow(_):
    while rank() == 1:
        tensors.append(torch.ones(2**22))


loop(then=grow)
