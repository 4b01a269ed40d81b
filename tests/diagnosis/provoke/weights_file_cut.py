"""A weights file whose download was cut."""

from __future__ import annotations

from pathlib import Path

from parts import MODEL, grpo

weights = Path(MODEL) / "model.safetensors"
weights.write_bytes(weights.read_bytes()[:4000])
grpo()
