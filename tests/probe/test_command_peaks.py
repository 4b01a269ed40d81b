"""Peaks of a command over its ranks, and what its end says about memory, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.probe.assembly import tree_peaks
from autotune.probe.command_reply import CommandReply
from autotune.probe.device_meter import DevicePeaks, Reading
from autotune.probe.limits import CgroupV1
from autotune.probe.process_meter import ProcessMeter
from autotune.probe.root_failure import KernelReport, failure_of


def rank(base: int, peak: int, **by_phase: int) -> dict[str, Any]:
    result = {"peak_bytes": peak, "phase_peak_bytes": by_phase}
    return {"event": "measured", "base_bytes": base, "result": result}


TWO_RANKS = CommandReply(
    results={
        0: rank(50, 80, forward=70, backward=80),
        1: rank(60, 65, forward=65, backward=60),
    },
    usage_before_bytes=200,
)


def test_ranks_grow_from_what_the_tree_used_before() -> None:
    """200 before; the ranks grow by 30 and 5: 235. In the forward pass by 20 and 5, in the
    backward pass by 30 and nothing.
    """
    peaks = tree_peaks(TWO_RANKS, 190, {"load": 150}, None)
    assert peaks.peak_bytes == 235
    assert peaks.phase_peak_bytes == {"load": 150, "forward": 225, "backward": 230}


@pytest.mark.parametrize(
    ("ceiling", "meter", "peak"),
    [
        (228, 190, 228),  # their peaks did not coincide
        (400, 190, 235),
        (210, 220, 220),  # the meter saw more than the ceiling says
    ],
)
def test_a_ceiling_bounds_peaks_that_need_not_coincide(
    ceiling: int,
    meter: int,
    peak: int,
) -> None:
    assert tree_peaks(TWO_RANKS, meter, {}, ceiling).peak_bytes == peak


def test_a_tree_that_cannot_be_read_has_no_peak() -> None:
    meter = ProcessMeter(lambda: None, interval_seconds=60.0)
    try:
        assert meter.now() == 0
        assert meter.peak_bytes == 0
    finally:
        meter.close()


def test_kernels_without_shared_memory_in_their_table_are_read(tmp_path: Path) -> None:
    """`total_shmem` came with Linux 4.19."""
    group = CgroupV1.__new__(CgroupV1)
    group.path = tmp_path
    table = tmp_path / "memory.stat"
    table.write_text("cache 8192\ntotal_rss 4096\n")
    assert group.usage_bytes() == 4096
    table.write_text("total_rss 4096\ntotal_shmem 512\n")
    assert group.usage_bytes() == 4608


@pytest.mark.parametrize(
    ("ended", "is_out_of_memory"),
    [
        ({"signal": 6, "exit": None}, True),
        ({"signal": None, "exit": 1}, False),
    ],
    ids=["aborted", "exited"],
)
def test_an_abort_at_the_limit_is_out_of_memory_and_an_exit_is_not(
    ended: dict[str, int | None],
    is_out_of_memory: bool,
) -> None:
    """An allocator that is refused memory aborts; a script that ends itself has its own reason."""
    lost = {"event": "lost", "rank": 0, "phase": "backward", **ended}
    kernel = KernelReport(
        out_of_memory=False,
        own_limit=False,
        full=True,
    )
    outcome, _ = failure_of(CommandReply(failures=[lost]), kernel, "cpu", 1.0)
    assert outcome.is_out_of_memory is is_out_of_memory


def test_memory_that_others_took_since_is_not_the_probes() -> None:
    """5 and 30 used bytes were sampled; the list says then that 10 are of others."""
    peaks = DevicePeaks(before=Reading(used_bytes=0, processes={}), foreign_bytes=0)
    peaks.take(5, "load")
    peaks.take(30, "backward")
    peaks._attribute(10)
    assert peaks.phase_peak_bytes == {"load": 0, "backward": 20}
    assert peaks.peak_bytes == 20
    assert not peaks.unattributed
