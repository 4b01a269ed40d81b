"""A model that finds no room when it is moved to the GPU."""

from __future__ import annotations

from parts import fail_at, gpu_memory, out_of_memory, plain_trainer

message = gpu_memory(
    "90.00 MiB",
    total="15.77 GiB",
    free="20.00 MiB",
    process="15.74 GiB",
    live="15.40 GiB",
    idle="12.00 MiB",
    torch="2.1",
)
fail_at("transformers.trainer:Trainer._move_model_to_device", out_of_memory(message))
plain_trainer()
