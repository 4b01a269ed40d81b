"""NCCL requested with a build of torch without it."""

from __future__ import annotations

import torch.distributed as dist

dist.init_process_group("nccl")
