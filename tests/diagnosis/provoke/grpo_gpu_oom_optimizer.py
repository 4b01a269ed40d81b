"""GRPO whose optimizer finds no room for its state at the first step."""

from __future__ import annotations

from parts import fail_at, gpu_memory, grpo, out_of_memory

message = gpu_memory(
    "258.00 MiB",
    total="39.39 GiB",
    free="61.81 MiB",
    process="39.32 GiB",
    live="38.61 GiB",
    idle="98.92 MiB",
    torch="2.11",
)
fail_at("torch.optim.adam:Adam._init_group", out_of_memory(message))
grpo(optim="adamw_torch")
