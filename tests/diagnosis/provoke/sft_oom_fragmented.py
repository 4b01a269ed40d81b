"""SFT on a GPU that has enough, in pieces too small."""

from __future__ import annotations

from parts import fail_at, gpu_memory, out_of_memory, sft

message = gpu_memory(
    "3.10 GiB",
    total="79.19 GiB",
    free="1.02 GiB",
    process="78.15 GiB",
    live="57.38 GiB",
    idle="19.90 GiB",
)
fail_at("transformers.models.qwen2.modeling_qwen2:Qwen2MLP.forward", out_of_memory(message), call=7)
sft()
