"""vLLM asked for longer sequences than the model has positions."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(max_model_len=100000)
