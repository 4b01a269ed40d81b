"""Evaluation requested without data for it."""

from __future__ import annotations

from parts import sft

sft(eval_strategy="steps", eval_steps=2)
