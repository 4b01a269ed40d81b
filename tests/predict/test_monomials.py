"""Sums of products, found again from what they give at a few points."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.predict.pieces.monomials import Basis, Floats
from autotune.predict.pieces.points import Point, rows_of
from autotune.predict.pieces.survey import corner, picked

SPACE = [
    Point(micro_batch=batch, prompt=prompt, completion=completion, micro_steps=steps)
    for batch, prompt, completion, steps in ((1, 256, 256, 4), (8, 512, 1024, 64), (4, 256, 512, 16))
]
POINTS = rows_of(picked(SPACE))
FAR = rows_of([corner(SPACE), Point(micro_batch=3, prompt=300, completion=777, micro_steps=9)])


def found(of: object, points: Floats = POINTS) -> tuple[Floats, bool]:
    """What is foreseen at the far points for a size that is `of` a point, from what it is at the picked ones."""
    rows = np.array([[of(*row) for row in points]])  # type: ignore[operator]
    basis = Basis.of(points)
    coefficients, exact = basis.fit(points, rows)
    if not exact.all():
        basis = basis.with_caps(points, rows)
        coefficients, exact = basis.fit(points, rows)
    return basis.values(FAR) @ coefficients[0], bool(exact[0])


SIZES = {
    "a constant": lambda b, p, c, n: 4096,
    "hidden states": lambda b, p, c, n: 2 * 3584 * b * (p + c),
    "shifted": lambda b, p, c, n: 8 * b * (p + c - 1),
    "the completion's logits": lambda b, p, c, n: 2 * 152064 * b * (c + 1),
    "a generation's tokens": lambda b, p, c, n: 8 * b * n * (p + c),
    "a mask": lambda b, p, c, n: b * (p + c) ** 2,
    "a causal square": lambda b, p, c, n: 4 * (p + c) ** 2,
    "rounded up by a kernel": lambda b, p, c, n: 4 * 128 * b * (-(-(p + c) // 128) * 128),
    "a tile": lambda b, p, c, n: 65536 * min(4096, b * c),
    "a shifted tile": lambda b, p, c, n: 65536 * min(4096, b * (p + c - 1)),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_tensors_are_found_exactly(name: str) -> None:
    foreseen, exact = found(SIZES[name])
    assert exact
    assert foreseen == pytest.approx([SIZES[name](*row) for row in FAR], rel=1e-9)


@settings(deadline=None, max_examples=30)
@given(hidden=st.integers(1, 20000), width=st.integers(1, 64), fixed=st.integers(0, 10**9))
def test_any_width_and_anything_fixed_beside(hidden: int, width: int, fixed: int) -> None:
    def size(b: float, p: float, c: float, n: float) -> float:
        return fixed + hidden * b * (p + c) + width * b * n

    foreseen, exact = found(size)
    assert exact and foreseen == pytest.approx([size(*row) for row in FAR], rel=1e-9)


def test_what_is_no_such_sum_is_said_to_be_none() -> None:
    foreseen, exact = found(lambda b, p, c, n: 1000 * b * p * c / (n + p % 7 + 1))
    assert not exact and np.isfinite(foreseen).all()


def test_what_never_moves_is_no_variable() -> None:
    fixed = rows_of([Point(micro_batch=2, prompt=256, completion=c, micro_steps=4) for c in (128, 256, 512)])
    assert {axes for term in Basis.of(fixed).terms for axes, _ in term.products} <= {"", "S", "C", "SS", "CC"}
