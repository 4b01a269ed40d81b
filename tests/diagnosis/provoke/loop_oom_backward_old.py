"""A plain loop whose backward pass finds no room, in the words of an older torch."""

from __future__ import annotations

from parts import fail_at, gpu_memory, loop

message = gpu_memory(
    "1.95 GiB",
    total="10.76 GiB",
    free="1.20 GiB",
    process="8.80 GiB",
    live="8.11 GiB",
    idle="",
    torch="1.13",
)
fail_at("torch.autograd:_engine_run_backward", RuntimeError(message), call=2)
loop()
