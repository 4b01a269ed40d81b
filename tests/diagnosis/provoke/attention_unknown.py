"""An attention that does not exist."""

from __future__ import annotations

from parts import grpo

grpo(model_init_kwargs={"attn_implementation": "paged_flash_9"})
