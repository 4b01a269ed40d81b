"""GRPO whose layers find no room, in the training forward."""

from __future__ import annotations

from parts import fail_at, gpu_memory, grpo, learning, out_of_memory

message = gpu_memory(
    "896.00 MiB",
    total="79.19 GiB",
    free="443.06 MiB",
    process="78.74 GiB",
    live="76.90 GiB",
    idle="812.32 MiB",
)
fail_at(
    "transformers.models.qwen2.modeling_qwen2:Qwen2MLP.forward",
    out_of_memory(message),
    when=learning,
)
grpo(gradient_checkpointing=False)
