"""A checkpoint on a disk that is too small for it."""

from __future__ import annotations

from parts import sft

sft(save_strategy="steps", save_steps=2)
