"""flash-attention requested, but not installed."""

from __future__ import annotations

from parts import grpo

grpo(model_init_kwargs={"attn_implementation": "flash_attention_2"})
