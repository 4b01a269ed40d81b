"""A tokenizer's file that was cut."""

from __future__ import annotations

from pathlib import Path

from parts import MODEL, grpo

file = Path(MODEL) / "tokenizer.json"
file.write_text(file.read_text()[:2000])
grpo()
