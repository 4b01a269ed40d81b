"""Two ranks with a model of which nothing is trained."""

from __future__ import annotations

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4).requires_grad_(False)
torch.nn.parallel.DistributedDataParallel(model)
