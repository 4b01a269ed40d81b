"""vLLM's sleep mode, where there is none."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(enable_sleep_mode=True)
