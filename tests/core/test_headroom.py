"""Headroom of a recommendation, worked out by hand."""

from __future__ import annotations

import pytest

from autotune.core.errors import BadInput
from autotune.core.headroom import Headroom, default_headroom
from autotune.core.measurement import Memory, Verdict
from autotune.core.units import GIB, MIB
from autotune.request.resources import headroom
from autotune.request.values import MemoryLimit

LIMIT_BYTES = 40 * GIB


def memory(peak_bytes: int, lowest_peak_bytes: int | None = None) -> Memory:
    return Memory(
        peak_bytes=peak_bytes,
        limit_bytes=LIMIT_BYTES,
        bound_by="device",
        lowest_peak_bytes=lowest_peak_bytes,
    )


@pytest.mark.parametrize(
    ("peak_gib", "lowest_gib", "left_free_mib"),
    [
        (38, None, 819),  # 2 % of 40,960 MiB
        (38, 37.5, 819),  # half a GiB apart: less than 2 %
        (38, 36, 2048),
    ],
)
def test_two_percent_or_the_spread_of_its_own_peaks(
    peak_gib: int, lowest_gib: float | None, left_free_mib: int
) -> None:
    lowest_bytes = None if lowest_gib is None else int(lowest_gib * GIB)
    required = default_headroom(LIMIT_BYTES).required(memory(peak_gib * GIB, lowest_bytes))
    assert required.bytes // MIB == left_free_mib


@pytest.mark.parametrize(("peak_mib", "fits"), [(40_960 - 820, True), (40_960 - 819, False)])
def test_what_leaves_less_is_not_recommended(peak_mib: int, fits: bool) -> None:
    peak_bytes = peak_mib * MIB
    margin_bytes = LIMIT_BYTES - peak_bytes
    verdict = Verdict(fits=True, why="peak", margin_bytes=margin_bytes)
    judged = default_headroom(LIMIT_BYTES).judge(verdict, memory(peak_bytes))
    assert judged.fits is fits
    assert judged.margin_bytes == margin_bytes
    assert ("--headroom 0 accepts it" in judged.why) is not fits


def test_a_stated_headroom_ignores_the_spread() -> None:
    verdict = Verdict(fits=True, why="peak", margin_bytes=0)
    at_the_limit = memory(LIMIT_BYTES, LIMIT_BYTES - GIB)
    assert Headroom(why="--headroom").judge(verdict, at_the_limit) is verdict


@pytest.mark.parametrize(
    ("stated", "least_bytes"),
    [
        (None, 858_993_459),  # 2 % of 42,949,672,960
        (MemoryLimit(text="0", size_bytes=0), 0),
        (MemoryLimit(text="1G", size_bytes=GIB), GIB),
        (MemoryLimit(text="5%", share=0.05), 2 * GIB),
    ],
)
def test_the_flag(stated: MemoryLimit | None, least_bytes: int) -> None:
    assert headroom(stated, LIMIT_BYTES).least_bytes == least_bytes


def test_the_whole_limit_is_refused() -> None:
    with pytest.raises(BadInput, match="leaves nothing of the limit, 40 GiB"):
        headroom(MemoryLimit(text="100%", share=1.0), LIMIT_BYTES)
