"""vLLM configured to distribute four heads over three ranks."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(tensor_parallel_size=3)
