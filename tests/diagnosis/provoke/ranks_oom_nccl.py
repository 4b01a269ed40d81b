"""Two ranks on GPUs: NCCL finds no room for its buffers."""

from __future__ import annotations

import torch.distributed as dist
from parts import fail_at, plain_trainer

message = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled "
    "cuda error (run with NCCL_DEBUG=INFO for "
    "details), NCCL version 2.27.5\nncclUnhandledCudaError: Call to CUDA function "
    "failed.\nLast error:\nCuda failure 2 'out of memory'"
)
fail_at("torch.distributed.distributed_c10d:all_reduce", dist.DistBackendError(message), on_rank=1)
fail_at("torch.distributed:all_reduce", dist.DistBackendError(message), on_rank=1)
plain_trainer(
    ddp_backend="gloo",
    logging_steps=1,
    average_tokens_across_devices=True,
)
if dist.get_rank() == 1:
    dist.all_reduce(None)
