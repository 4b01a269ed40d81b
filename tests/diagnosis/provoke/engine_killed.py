"""vLLM's engine, ended by the kernel at a memory limit while it starts."""

from __future__ import annotations

import torch
from parts import engine
from vllm.v1.worker.cpu_worker import CPUWorker


def grow(_: CPUWorker) -> int:
    tensors = []
    while True:
        tensors.append(torch.ones(2**24))


# Not under the guard below: the engine's processes read this file anew.
CPUWorker.determine_available_memory = grow

if __name__ == "__main__":
    engine()
