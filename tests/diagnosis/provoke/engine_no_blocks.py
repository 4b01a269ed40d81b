"""vLLM whose weights leave nothing for its cache."""

from __future__ import annotations

from parts import engine
from vllm.v1.worker.cpu_worker import CPUWorker

# Not under the guard below: the engine's processes read this file anew.
CPUWorker.determine_available_memory = lambda self: -1_300_000_000

if __name__ == "__main__":
    engine()
