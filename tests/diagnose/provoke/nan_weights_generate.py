"""Weights that are no numbers any more, asked for the next word."""

from __future__ import annotations

import torch
from parts import causal_model, grpo

model = causal_model()
with torch.no_grad():
    model.model.embed_tokens.weight.fill_(float("nan"))
grpo(model=model)
