"""Online DPO's trainer with what it generates made up: the rest of its step is its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

COMPLETIONS = 2
"""To each prompt."""


def generating_nothing(trainer_class: Any, watch: Any, lengths: Any) -> Any:
    """The trainer's class, which takes completions of the longest length for granted."""
    import torch

    class Answered(trainer_class):  # type: ignore[misc]
        def _generate(self, model: Any, prompts: Sequence[Any], images: Any = None) -> Any:
            rows = COMPLETIONS * len(prompts)
            asked, written = lengths.prompts(rows), lengths.completions(rows)
            device = self.accelerator.device
            return *_padded(torch, asked, device, left=True), *_padded(torch, written, device, left=False), None

        def _calculate_rewards_from_functions(self, *args: Any, **kwargs: Any) -> Any:
            with watch.inside("reward"):
                return super()._calculate_rewards_from_functions(*args, **kwargs)

    Answered.__name__ = trainer_class.__name__
    return Answered


def _padded(torch: Any, rows: Sequence[Sequence[int]], device: Any, *, left: bool) -> tuple[Any, Any]:
    """Token ids and their mask, every row as long as the longest."""
    longest = max(len(row) for row in rows)
    fill = [[0] * (longest - len(row)) for row in rows]
    ids = [[*gap, *row] if left else [*row, *gap] for row, gap in zip(rows, fill, strict=True)]
    masks = [[*gap, *[1] * len(row)] if left else [*[1] * len(row), *gap] for row, gap in zip(rows, fill, strict=True)]
    return torch.tensor(ids, device=device), torch.tensor(masks, device=device)
