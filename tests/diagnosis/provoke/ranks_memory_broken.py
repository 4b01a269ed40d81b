"""A GPU whose memory has a fault that cannot be corrected."""

from __future__ import annotations

import torch
from parts import loop, rank


def fail(_):
    if rank() == 1:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")


loop(then=fail)
