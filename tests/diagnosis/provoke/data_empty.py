"""A data set whose filter left nothing."""

from __future__ import annotations

from parts import grpo, rows

grpo(data=rows().filter(lambda row: len(row["prompt"]) > 500))
