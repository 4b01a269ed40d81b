"""Sequences requested from vLLM that are longer than the model's positions."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(max_model_len=100000)
