"""vLLM with a precision that does not exist."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(dtype="float15")
