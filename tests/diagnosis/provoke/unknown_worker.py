"""A user's own data set that fails in a loader's worker."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader


class Own(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        return 1 / (index - 3)


if __name__ == "__main__":
    for batch in DataLoader(Own(), num_workers=2):
        print(batch)
