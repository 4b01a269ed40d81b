"""A plain loop that saves onto a full disk."""

from __future__ import annotations

import torch
from parts import loop

loop(
    then=lambda model: torch.save(
        {"model": model.state_dict(), "rest": torch.ones(2**20)}, "out/model.pt"
    )
)
