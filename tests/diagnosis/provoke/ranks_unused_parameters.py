"""Two ranks whose model has a part that no loss reaches."""

from __future__ import annotations

import torch
import torch.distributed as dist


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(Two())
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
