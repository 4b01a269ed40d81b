"""A model that does not fit onto the GPU."""

from __future__ import annotations

from parts import fail_at, gpu_memory, grpo, out_of_memory

message = gpu_memory(
    "544.00 MiB",
    total="15.77 GiB",
    free="396.75 MiB",
    process="15.38 GiB",
    live="15.01 GiB",
    idle="10.12 MiB",
    torch="2.1",
)
fail_at(
    "transformers.modeling_utils:PreTrainedModel._load_pretrained_model", out_of_memory(message)
)
grpo()
