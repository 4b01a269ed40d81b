"""NCCL asked for, with a build of torch that has none."""

from __future__ import annotations

import torch.distributed as dist

dist.init_process_group("nccl")
