"""Two precisions at once."""

from __future__ import annotations

from parts import plain_trainer

plain_trainer(fp16=True, bf16=True)
