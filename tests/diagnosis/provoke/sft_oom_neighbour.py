"""SFT on a GPU with a running process of another user."""

from __future__ import annotations

from parts import fail_at, gpu_memory, out_of_memory, sft

neighbours = "Process 1893342 has 61.44 GiB memory in use. "
message = gpu_memory(
    "594.00 MiB",
    total="79.15 GiB",
    free="212.88 MiB",
    process="17.48 GiB",
    live="16.80 GiB",
    idle="154.20 MiB",
    neighbours=neighbours,
)
fail_at(
    "transformers.models.qwen2.modeling_qwen2:Qwen2DecoderLayer.forward",
    out_of_memory(message),
    call=3,
)
sft()
