"""An 8-bit optimizer that finds no room for its state."""

from __future__ import annotations

from parts import fail_at, gpu_memory, out_of_memory, sft

message = gpu_memory(
    "130.00 MiB",
    total="23.64 GiB",
    free="40.00 MiB",
    process="23.58 GiB",
    live="23.01 GiB",
    idle="120.00 MiB",
)
fail_at("bitsandbytes.optim.optimizer:Optimizer2State.init_state", out_of_memory(message))
sft(optim="adamw_bnb_8bit")
