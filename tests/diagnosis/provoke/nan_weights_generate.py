"""Generation with weights that are not finite."""

from __future__ import annotations

import torch
from parts import causal_model, grpo

model = causal_model()
with torch.no_grad():
    model.model.embed_tokens.weight.fill_(float("nan"))
grpo(model=model)
