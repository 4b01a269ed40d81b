"""The same in a terminal that draws its tracebacks as boxes."""

from __future__ import annotations

from parts import fail_at, gpu_memory, out_of_memory, sft
from rich.traceback import install

install(width=100)
message = gpu_memory(
    "1.16 GiB",
    total="79.19 GiB",
    free="512.00 MiB",
    process="78.60 GiB",
    live="76.02 GiB",
    idle="1.40 GiB",
)
fail_at("transformers.models.qwen2.modeling_qwen2:Qwen2MLP.forward", out_of_memory(message), call=7)
sft()
