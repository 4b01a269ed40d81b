"""A GPU that fell off the bus, beside a rank that notices."""

from __future__ import annotations

import sys
import time

import torch
from parts import loop, rank


def fall(_):
    if rank() == 1:
        message = (
            "NVRM: Xid (PCI:0000:65:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off"
            " the bus."
        )
        print(f"[ 9132.418811] {message}", file=sys.stderr, flush=True)
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")
    time.sleep(2)


loop(then=fall)
