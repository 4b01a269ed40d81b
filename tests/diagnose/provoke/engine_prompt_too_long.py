"""A prompt that is longer than what vLLM was told to take."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(max_model_len=32).generate(["What is " + "1 + " * 64 + "1?"])
