"""Quantisation requested that vLLM does not have."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(quantization="int3")
