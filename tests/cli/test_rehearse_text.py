"""Lines of `autotune rehearse` about a process."""

from __future__ import annotations

import pytest

from autotune.cli.rehearse import torch_counters
from autotune.core.units import GIB


@pytest.mark.parametrize(
    ("reserved", "says"),
    [
        (30 * GIB, " (torch: 20 GiB allocated, 30 GiB reserved)"),
        (
            48 * GIB,
            " (torch: 20 GiB allocated, 48 GiB reserved, with what a sleeping engine gave back)",
        ),
    ],
)
def test_torch_may_count_more_than_the_card_held(reserved: int, says: str) -> None:
    row = {
        "peak_bytes": 34 * GIB,
        "torch_allocated_bytes": 20 * GIB,
        "torch_reserved_bytes": reserved,
    }
    assert torch_counters(row) == says
    assert torch_counters({**row, "torch_reserved_bytes": None}) == ""
