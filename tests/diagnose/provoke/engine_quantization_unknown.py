"""vLLM asked for a quantisation that it does not know."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(quantization="int3")
