"""SFT whose loss finds no room, in the words of an older torch."""

from __future__ import annotations

from parts import fail_at, gpu_memory, plain_trainer

message = gpu_memory(
    "4.64 GiB",
    total="23.69 GiB",
    free="3.10 GiB",
    process="19.89 GiB",
    live="18.12 GiB",
    idle="",
    torch="1.13",
)
fail_at("transformers.loss.loss_utils:fixed_cross_entropy", RuntimeError(message))
plain_trainer()
