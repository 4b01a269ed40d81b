"""A loader's worker that the kernel kills for lack of memory."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

tensors: list[torch.Tensor] = []


class Growing(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        tensors.append(torch.ones(2**22))
        return torch.ones(4)


if __name__ == "__main__":
    for step, batch in enumerate(DataLoader(Growing(), batch_size=4, num_workers=1)):
        print({"loss": batch.mean().item(), "step": step}, flush=True)
