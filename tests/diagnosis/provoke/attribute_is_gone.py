"""An attribute that this torch does not have."""

from __future__ import annotations

import torch
from parts import loop

loop(then=lambda model: torch.utils.swap_parameters_of(model))
