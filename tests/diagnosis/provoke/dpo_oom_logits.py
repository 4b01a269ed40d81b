"""DPO whose log-probabilities find no room."""

from __future__ import annotations

from parts import dpo, fail_at, gpu_memory, out_of_memory

message = gpu_memory(
    "9.28 GiB",
    total="79.19 GiB",
    free="512.00 MiB",
    process="78.60 GiB",
    live="76.02 GiB",
    idle="1.40 GiB",
    torch="2.11",
)
fail_at(
    "trl.kernels.chunked_logprob:ChunkedLogProbFunction.forward", out_of_memory(message), call=2
)
dpo()
