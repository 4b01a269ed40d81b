"""GRPO whose backward pass finds no room."""

from __future__ import annotations

from parts import fail_at, gpu_memory, grpo, out_of_memory

message = gpu_memory(
    "2.32 GiB",
    total="79.19 GiB",
    free="512.00 MiB",
    process="78.60 GiB",
    live="76.02 GiB",
    idle="1.40 GiB",
    torch="2.11",
)
fail_at("torch.autograd:_engine_run_backward", out_of_memory(message), call=2)
grpo()
