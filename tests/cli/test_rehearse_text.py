"""Lines of `autotune rehearse` about a process."""

from __future__ import annotations

import pytest

from autotune.cli.rehearse import torch_counters
from autotune.core.units import GIB
from autotune.emulator.reports import ProcessReport


@pytest.mark.parametrize(
    ("reserved", "says"),
    [
        (30 * GIB, " (torch: 20 GiB allocated, 30 GiB reserved)"),
        (48 * GIB, " (torch: 20 GiB allocated, 48 GiB reserved, with what a sleeping engine gave back)"),
    ],
)
def test_torch_may_count_more_than_the_card_held(reserved: int, says: str) -> None:
    process = ProcessReport(
        pid=1, peak_bytes={0: 34 * GIB}, torch_allocated_bytes={0: 20 * GIB}, torch_reserved_bytes={0: reserved},
        phase_peak_bytes={}, refused=0, launches=0, skipped_copies=0, skipped_bytes=0, calls={},
    )  # fmt: skip
    assert torch_counters(process, 0) == says
    assert torch_counters(process, 1) == ""
