"""ZeRO-3 on two ranks: one finds no room to gather the weights for generation."""

from __future__ import annotations

from parts import fail_at, gpu_memory, grpo, inside, on_gloo, out_of_memory, zero

on_gloo()
message = gpu_memory(
    "1.02 GiB",
    total="79.15 GiB",
    free="720.75 MiB",
    process="78.44 GiB",
    live="75.61 GiB",
    idle="633.10 MiB",
    gpu=1,
)
fail_at(
    "deepspeed.runtime.zero.partition_parameters:GatheredParameters.__enter__",
    out_of_memory(message),
    on_rank=1,
    when=lambda: inside("unwrap_model_for_generation"),
)
grpo(deepspeed=zero(3))
