"""A loader's workers in a container whose /dev/shm is too small."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader


class Large(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(2**20)


if __name__ == "__main__":
    for step, batch in enumerate(DataLoader(Large(), batch_size=8, num_workers=2)):
        print({"loss": batch.mean().item() / (step + 1), "step": step})
