"""vLLM configured for more memory than is free."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(gpu_memory_utilization=0.999)
