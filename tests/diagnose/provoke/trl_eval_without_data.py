"""Evaluation asked for, and nothing to evaluate on."""

from __future__ import annotations

from parts import sft

sft(eval_strategy="steps", eval_steps=2)
