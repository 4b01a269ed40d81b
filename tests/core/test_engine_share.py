"""Engine shares of a limit and of the GPU: the formulas, and both directions in a row."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.core.engine_share import share_of_gpu, share_of_limit, share_scale, usable_bytes
from autotune.core.units import GIB, MIB


def test_the_example_of_the_module() -> None:
    limit, memory = (usable_bytes(size * GIB, 500 * MIB) for size in (40, 80))
    scale = share_scale(limit, memory)
    assert scale == pytest.approx(39.51 / 79.51, abs=1e-4)
    assert 0.5 * limit / GIB == pytest.approx(19.76, abs=0.01)
    assert share_of_gpu(0.5, scale) == 0.2485
    assert share_of_limit(0.2485, scale) == 0.5


def test_a_share_above_the_limit_is_the_whole_limit() -> None:
    assert share_of_limit(0.9, 0.5) == 1.0
    assert share_of_limit(0.9, 0.0) == 1.0


def test_an_impossible_share_stays_one_to_be_refused() -> None:
    assert share_of_limit(1.5, 0.5) == 1.5


@given(ten_thousandths=st.integers(1, 10_000), scale=st.floats(0.02, 1.0))
def test_a_share_of_a_file_is_written_as_it_was(ten_thousandths: int, scale: float) -> None:
    stated = ten_thousandths / 10_000
    if stated < scale:
        assert share_of_gpu(share_of_limit(stated, scale), scale) == stated


@given(hundredths=st.integers(1, 99), scale=st.floats(0.02, 1.0))
def test_a_written_share_is_read_as_it_was(hundredths: int, scale: float) -> None:
    within = hundredths / 100
    assert share_of_limit(share_of_gpu(within, scale), scale) == within
