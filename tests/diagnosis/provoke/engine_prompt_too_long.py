"""A prompt that is longer than vLLM's configured maximum."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(max_model_len=32).generate(["What is " + "1 + " * 64 + "1?"])
