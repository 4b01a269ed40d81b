"""vLLM that measures memory while a neighbour gives some back."""

from __future__ import annotations

from parts import engine, fail_at

message = (
    "Error in memory profiling. Initial free memory 61.20 GiB, current free memory 73.91 GiB. This"
    " happens when other processes sharing the same container release GPU memory while vLLM is"
    " profiling during initialization. To fix this, ensure consistent GPU memory allocation or"
    " isolate vLLM in its own container."
)
# Not under the guard below: the engine's processes read this file anew.
fail_at("vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory", AssertionError(message))

if __name__ == "__main__":
    engine()
