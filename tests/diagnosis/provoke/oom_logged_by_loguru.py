"""The same, logged by loguru, as Open-Reasoner-Zero does."""

from __future__ import annotations

from loguru import logger
from parts import fail_at, gpu_memory, out_of_memory, plain_trainer

message = gpu_memory(
    "3.71 GiB",
    total="79.19 GiB",
    free="512.00 MiB",
    process="78.60 GiB",
    live="76.02 GiB",
    idle="1.40 GiB",
    torch="2.1",
)
fail_at("torch.nn.functional:cross_entropy", out_of_memory(message), call=2)
with logger.catch(reraise=False, message="training failed"):
    plain_trainer()
