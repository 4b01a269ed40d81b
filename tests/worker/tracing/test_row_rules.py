"""Results by rule, compared with those of the fake mode in form and memory."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from autotune.worker.tracing.dispatch_cache import _form, by_rule  # noqa: E402

aten = torch.ops.aten

REAL = torch.ones(4, 6)
LEARNS = torch.nn.Parameter(REAL)
ONE_NUMBER = torch.tensor([3])


def fake_mode() -> Any:
    return torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)


def conjugated() -> Any:
    return torch.empty(4, 6, dtype=torch.complex64).conj()


def freed() -> Any:
    whole = torch.empty(4, 6)
    whole.untyped_storage().resize_(0)
    return whole


@pytest.mark.parametrize("real", [REAL, REAL.long(), torch.ones(2, 1, dtype=torch.bool)])
def test_lifting_a_new_tensor(real: Any) -> None:
    with fake_mode() as mode:
        ours, its = by_rule(aten.lift_fresh.default, (real,), {}, mode), aten.lift_fresh.default(real)
        assert _form(ours) == _form(its)
        assert ours.fake_mode is mode
        assert ours.constant is its.constant is None


@pytest.mark.parametrize(("dim", "index"), [(0, 0), (0, 3), (1, 5)])
def test_selecting_a_row(dim: int, index: int) -> None:
    with fake_mode() as mode:
        for whole in (torch.empty(4, 6), torch.empty(3, 4, 6)[1]):
            ours, its = by_rule(aten.select.int, (whole, dim, index), {}, mode), whole.select(dim, index)
            assert _form(ours) == _form(its)
            assert ours.untyped_storage()._cdata == whole.untyped_storage()._cdata


def test_the_target_of_a_copy_is_returned() -> None:
    with fake_mode() as mode:
        target, source = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.int64)
        assert by_rule(aten.copy_.default, (target, source), {}, mode) is target


@pytest.mark.parametrize(
    ("func", "given"),
    [
        (aten.lift_fresh.default, lambda: (LEARNS,)),
        (aten.lift_fresh.default, lambda: (ONE_NUMBER,)),
        (aten.lift_fresh.default, lambda: (REAL[1:],)),
        (aten.lift_fresh.default, lambda: (REAL.t(),)),
        (aten.select.int, lambda: (torch.empty(4, 6), 0, -1)),
        (aten.select.int, lambda: (torch.empty(4, 6), 0, 4)),
        (aten.select.int, lambda: (freed(), 0, 1)),
        (aten.select.int, lambda: (conjugated(), 0, 1)),
        (aten.copy_.default, lambda: (torch.empty(4, 6), torch.empty(6))),
        (aten.copy_.default, lambda: (torch.tensor(3), torch.tensor(4))),
        (aten.copy_.default, lambda: (torch.empty(4, 6), REAL)),
        (aten.add.Tensor, lambda: (torch.empty(4, 6), 1)),
    ],
)
def test_other_cases_have_no_rule(func: Any, given: Any) -> None:
    with fake_mode() as mode:
        assert by_rule(func, given(), {}, mode) is None
