"""ZeRO-2 on two ranks: one finds no room for Adam's state."""

from __future__ import annotations

from parts import fail_at, gpu_memory, on_gloo, out_of_memory, plain_trainer, zero

on_gloo()
message = gpu_memory(
    "7.10 GiB",
    total="39.39 GiB",
    free="4.91 GiB",
    process="34.47 GiB",
    live="33.02 GiB",
    idle="912.72 MiB",
)
fail_at(
    "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.initialize_optimizer_states",
    out_of_memory(message),
    on_rank=0,
)
plain_trainer(deepspeed=zero(2))
