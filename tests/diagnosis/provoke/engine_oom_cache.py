"""vLLM whose cache finds no room on the GPU."""

from __future__ import annotations

from parts import engine, fail_at, gpu_memory, out_of_memory

message = gpu_memory(
    "7.42 GiB",
    total="79.19 GiB",
    free="3.06 GiB",
    process="76.12 GiB",
    live="75.20 GiB",
    idle="104.11 MiB",
)
# Not under the guard below: the engine's processes read this file anew.
fail_at(
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache_tensors",
    out_of_memory(message),
)

if __name__ == "__main__":
    engine()
