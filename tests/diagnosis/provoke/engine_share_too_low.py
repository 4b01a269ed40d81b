"""vLLM configured for less memory than it needs before its cache."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(gpu_memory_utilization=0.01)
