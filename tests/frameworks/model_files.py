"""Shapes and dtypes in a model's file, read without loading it."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open


def shapes(model: Path) -> list[tuple[int, ...]]:
    with safe_open(model / "model.safetensors", "pt") as file:
        names = list(file.keys())
        return [tuple(file.get_slice(name).get_shape()) for name in names]
