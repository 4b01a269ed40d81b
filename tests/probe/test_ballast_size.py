from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.probe.gpu_set import MIN_BALLAST_BYTES, needs_ballast, share_scale, usable_bytes

GIB = 2**30


def test_a_third_of_a_small_card_is_less_of_a_large_one() -> None:
    assert 0.3 * share_scale(38 * GIB, 80 * GIB) == pytest.approx(0.1425)
    assert share_scale(80 * GIB, 80 * GIB) == 1.0
    assert share_scale(90 * GIB, 80 * GIB) == 1.0, "an engine's share of more than there is would be refused"
    with pytest.raises(ValueError, match="no shares"):
        share_scale(1, 0)


def test_drivers_keep_their_part_of_the_small_card_too() -> None:
    assert usable_bytes(40 * GIB, GIB // 2) == 39.5 * GIB
    assert usable_bytes(40 * GIB, None) == 40 * GIB
    assert usable_bytes(GIB // 4, GIB // 2) == 0


def test_a_difference_smaller_than_a_context_needs_no_ballast() -> None:
    assert not needs_ballast(80 * GIB, 80 * GIB)
    assert not needs_ballast(80 * GIB - MIN_BALLAST_BYTES + 1, 80 * GIB)
    assert needs_ballast(80 * GIB - MIN_BALLAST_BYTES, 80 * GIB)


@given(
    share=st.floats(0.01, 1.0),
    total=st.integers(2 * GIB, 300 * GIB),
    fraction=st.floats(0.05, 1.0),
    reserved=st.integers(0, GIB),
)
def test_the_engine_gets_the_same_bytes_as_on_the_small_card(share: float, total: int, fraction: float, reserved: int) -> None:
    usable = usable_bytes(int((total + reserved) * fraction), reserved)
    if usable == 0:
        return
    # vLLM takes its share of all that the device shows; on the small card that would be `usable`.
    here, there = share * share_scale(usable, total) * total, share * min(usable, total)
    assert here == pytest.approx(there, rel=1e-9)
    assert 0 < share * share_scale(usable, total) <= share
