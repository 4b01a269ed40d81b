"""Tracker compared with plain torch on real tensors: storages and their lifetimes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from autotune.worker.tracing import Untraceable  # noqa: E402
from autotune.worker.tracing.fake_models import unseen_calls  # noqa: E402
from autotune.worker.tracing.ledger import Ledger  # noqa: E402
from autotune.worker.tracing.tracker import Tracker  # noqa: E402

KB = 1024


@contextmanager
def tracked(**options: Any) -> Iterator[Tracker]:
    tracker = Tracker(Ledger(), **options)
    with (
        torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
        tracker,
        unseen_calls(tracker, "cuda"),
    ):
        yield tracker


def peak_of(step: Callable[[], Any]) -> int:
    with tracked() as tracker:
        step()
    return tracker.ledger.peak


def test_a_storage_lives_as_long_as_any_tensor_on_it() -> None:
    with tracked() as tracker:
        base = torch.empty(256)
        row = base[:4]
        assert tracker.ledger.live == KB
        del base
        assert tracker.ledger.live == KB
        del row
        assert tracker.ledger.live == 0
    assert tracker.ledger.peak == KB


def test_a_workspace_is_freed_after_its_kernel() -> None:
    workspaces = {torch.ops.aten.exp.default: lambda call: 10 * KB}
    with tracked(workspaces=workspaces) as tracker:
        torch.empty(256).exp()
    assert tracker.ledger.peak == 12 * KB
    assert tracker.ledger.live == 0


def test_waiting_for_a_collective_makes_no_tensor() -> None:
    with tracked() as tracker:
        gathered = torch.empty(256)
        assert torch.ops._c10d_functional.wait_tensor(gathered) is gathered
    assert tracker.ledger.peak == KB


def test_gradients_of_one_tensor_accumulate_in_place() -> None:
    """The engine accumulates into the first gradient; with a dispatch mode on it does not, and the
    ledger corrects that."""

    def twice_used() -> None:
        leaf = torch.zeros(256, requires_grad=True)
        middle = leaf * 2
        (middle.exp() + middle.sin()).sum().backward()

    # leaf, middle (kept by sin), exp's result (kept), cos's and one product per branch: never a
    # third gradient of `middle`.
    with tracked() as tracker:
        twice_used()
    adds = [size for size in tracker.ledger.sizes if size == KB]
    out_of_place = Tracker._reuses_its_operand
    try:
        Tracker._reuses_its_operand = lambda *_: False  # type: ignore[method-assign]
        with tracked() as naive:
            twice_used()
    finally:
        Tracker._reuses_its_operand = out_of_place  # type: ignore[method-assign]
    assert len([size for size in naive.ledger.sizes if size == KB]) == len(adds) + 1


def test_a_referenced_gradient_is_not_overwritten() -> None:
    gradients: list[Any] = []

    class Holding(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return tensor * 1

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            ones = torch.ones(256)
            gradients.append(ones)
            return ones

    def step() -> None:
        middle = torch.zeros(256, requires_grad=True) * 2
        (middle.sin() + Holding.apply(middle)).sum().backward()

    with tracked() as tracker:
        step()
        assert tracker.ledger.live >= KB  # the referenced tensor is live to the end
    gradients.clear()


def test_a_sum_in_a_python_backward_is_a_new_tensor() -> None:
    class Adding(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return tensor.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            first = torch.ones(256)
            second = torch.ones(256)
            return first + second

    def step() -> None:
        Adding.apply(torch.zeros(256, requires_grad=True)).sum().backward()

    # the leaf and its clone's gradient expanded from one number; then both ones and their sum at
    # once
    assert peak_of(step) >= 4 * KB


def test_masks_have_known_values() -> None:
    with tracked():
        mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
        assert not mask.all()
        assert mask[1].all()
        assert int(mask.sum()) == 5
        assert mask.nonzero().shape == (5, 2)
        assert torch.empty(2, 3, 7)[mask].shape == (5, 7)
        labels = torch.arange(6).view(2, 3)
        labels[:, :-1] = -100
        assert (labels != -100).sum().item() == 2


def test_a_mask_of_unknown_values_selects_all() -> None:
    with tracked():
        mask = torch.empty(8) > 0
        assert torch.empty(8, 2)[mask].shape == (8, 2)
        assert mask.nonzero().shape == (8, 1)


def test_values_are_assumed_finite() -> None:
    with tracked():
        loss = torch.empty(())
        assert not torch.isnan(loss)
        assert not torch.isinf(loss)
        assert bool(torch.isfinite(loss))


def test_a_shape_that_depends_on_values_is_refused_by_name() -> None:
    with tracked(), pytest.raises(Untraceable, match="unique"):
        torch.empty(8).unique()


def test_parts_can_be_set_afterwards() -> None:
    with tracked() as tracker:
        tracker.ledger.enter("forward")
        tensor = torch.empty(256)
        tracker.set_part({"a": [tensor]}, "inputs")
        tracker.vocabulary = frozenset({64})
        logits = torch.empty(4, 64)
        names = tracker.ledger.as_json()
        assert [names["part_names"][part] for part in names["parts"]] == ["inputs", "logits"]
        del tensor, logits


def test_a_resized_storage_is_another_allocation_of_the_same_part() -> None:
    with tracked() as tracker:
        tensor = torch.empty(256)
        tensor.untyped_storage().resize_(0)
        assert tracker.ledger.live == 0
        tensor.untyped_storage().resize_(2 * KB)
        assert tracker.ledger.live == 2 * KB


def test_work_is_counted_by_phase_and_can_be_repeated() -> None:
    with tracked() as tracker:
        tracker.ledger.enter("score")
        factor = torch.empty(8, 16)
        right = torch.empty(16, 4)
        tracker.ledger.reset_work()
        with tracker.ledger.repeated_work(3):
            factor @ right
    assert tracker.ledger.flops == {("score", "float32"): 3 * 2 * 8 * 16 * 4}
    assert tracker.ledger.kernels["score"] == 3
    assert tracker.ledger.moved["score"] == 3 * 4 * (8 * 16 + 16 * 4 + 8 * 4)
