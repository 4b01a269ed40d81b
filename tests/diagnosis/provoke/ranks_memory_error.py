"""Two ranks, of which the second requests more memory than there is."""

from __future__ import annotations

import torch
from parts import loop, rank

loop(then=lambda model: torch.empty(10**15) if rank() == 1 else None)
