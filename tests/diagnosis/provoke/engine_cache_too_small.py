"""vLLM with a cache that holds less than one sequence."""

from __future__ import annotations

from parts import engine

if __name__ == "__main__":
    engine(max_model_len=4096, kv_cache_memory_bytes=2 * 2**20)
