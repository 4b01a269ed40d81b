"""Two ranks on AMD's GPUs, of which the first finds no room."""

from __future__ import annotations

from parts import fail_at, gpu_memory, out_of_memory, plain_trainer

message = gpu_memory(
    "4.00 GiB",
    total="63.98 GiB",
    free="2.11 GiB",
    process="61.80 GiB",
    live="60.20 GiB",
    idle="880.00 MiB",
)
message = message.replace("CUDA out", "HIP out")
fail_at(
    "transformers.models.qwen2.modeling_qwen2:Qwen2MLP.forward",
    out_of_memory(message),
    on_rank=0,
    call=6,
)
plain_trainer(ddp_backend="gloo")
