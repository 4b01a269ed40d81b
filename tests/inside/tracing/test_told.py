"""What is told by a rule is what the fake mode gives, in form and in memory."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from autotune.inside.tracing.remembered import _form  # noqa: E402
from autotune.inside.tracing.told import told  # noqa: E402

aten = torch.ops.aten

REAL = torch.ones(4, 6)
LEARNS = torch.nn.Parameter(REAL)
ONE_NUMBER = torch.tensor([3])


def fake_mode() -> Any:
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)


def conjugated() -> Any:
    return torch.empty(4, 6, dtype=torch.complex64).conj()


def given_back() -> Any:
    whole = torch.empty(4, 6)
    whole.untyped_storage().resize_(0)
    return whole


@pytest.mark.parametrize("real", [REAL, REAL.long(), torch.ones(2, 1, dtype=torch.bool)])
def test_a_tensor_that_was_just_made(real: Any) -> None:
    with fake_mode() as mode:
        ours, its = told(aten.lift_fresh.default, (real,), {}, mode), aten.lift_fresh.default(real)
        assert _form(ours) == _form(its)
        assert ours.fake_mode is mode
        assert ours.constant is its.constant is None


@pytest.mark.parametrize(("dim", "index"), [(0, 0), (0, 3), (1, 5)])
def test_a_row_of_another(dim: int, index: int) -> None:
    with fake_mode() as mode:
        for whole in (torch.empty(4, 6), torch.empty(3, 4, 6)[1]):
            ours, its = told(aten.select.int, (whole, dim, index), {}, mode), whole.select(dim, index)
            assert _form(ours) == _form(its)
            assert ours.untyped_storage()._cdata == whole.untyped_storage()._cdata


def test_what_is_copied_to_stays_itself() -> None:
    with fake_mode() as mode:
        target, source = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.int64)
        assert told(aten.copy_.default, (target, source), {}, mode) is target


@pytest.mark.parametrize(
    ("func", "given"),
    [
        (aten.lift_fresh.default, lambda: (LEARNS,)),
        (aten.lift_fresh.default, lambda: (ONE_NUMBER,)),
        (aten.lift_fresh.default, lambda: (REAL[1:],)),
        (aten.lift_fresh.default, lambda: (REAL.t(),)),
        (aten.select.int, lambda: (torch.empty(4, 6), 0, -1)),
        (aten.select.int, lambda: (torch.empty(4, 6), 0, 4)),
        (aten.select.int, lambda: (given_back(), 0, 1)),
        (aten.select.int, lambda: (conjugated(), 0, 1)),
        (aten.copy_.default, lambda: (torch.empty(4, 6), torch.empty(6))),
        (aten.copy_.default, lambda: (torch.tensor(3), torch.tensor(4))),
        (aten.copy_.default, lambda: (torch.empty(4, 6), REAL)),
        (aten.add.Tensor, lambda: (torch.empty(4, 6), 1)),
    ],
)
def test_what_the_rule_does_not_say_is_left_to_the_mode(func: Any, given: Any) -> None:
    with fake_mode() as mode:
        assert told(func, given(), {}, mode) is None
