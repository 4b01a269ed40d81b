"""FLOPs of attention kernels, compared with counting every visible pair; bytes of lists changed in
place."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from autotune.worker.tracing import operands  # noqa: E402
from autotune.worker.tracing.ledger import Ledger  # noqa: E402
from autotune.worker.tracing.tracker import Tracker  # noqa: E402

ROWS = 2
LENGTH = 256
HEADS = 8
KV_HEADS = 2
SIZE = 64
aten = torch.ops.aten


def visible(*, causal: bool, window: int | None) -> int:
    """Count the keys that the queries of one row see."""
    return sum(
        sum(
            1
            for key in range(LENGTH)
            if not causal or (key <= query and (window is None or query - key < window))
        )
        for query in range(LENGTH)
    )


@pytest.mark.parametrize(
    ("causal", "window"),
    [
        (False, None),
        (True, None),
        (True, 32),
        (True, 1000),
    ],
)
def test_pairs_are_those_that_the_mask_leaves(causal: bool, window: int | None) -> None:
    counted = LENGTH * operands.seen_keys(LENGTH, causal=causal, window=window)
    assert counted == pytest.approx(visible(causal=causal, window=window), rel=0.02)


def flops_of(name: str, *args: object, **kwargs: object) -> float:
    operation = getattr(aten, name)
    formula = operands.flops_of(operation, operation.default._schema.arguments)
    assert formula is not None
    return formula(*args, **kwargs)


def test_both_layouts_of_one_kernel_count_the_same() -> None:
    query, key = (
        torch.empty(ROWS, LENGTH, heads, SIZE, device="meta") for heads in (HEADS, KV_HEADS)
    )
    rows_first = flops_of(
        "_flash_attention_forward", query, key, key, None, None, LENGTH, LENGTH, 0.0, True, False
    )
    turned = [tensor.transpose(1, 2) for tensor in (query, key, key)]
    assert flops_of("_scaled_dot_product_flash_attention", *turned, 0.0, True) == rows_first
    assert rows_first == pytest.approx(
        4 * ROWS * HEADS * SIZE * visible(causal=True, window=None), rel=0.02
    )


def test_the_backward_pass_has_five_products_for_two() -> None:
    query, key = (
        torch.empty(ROWS, LENGTH, heads, SIZE, device="meta") for heads in (HEADS, KV_HEADS)
    )
    forward = flops_of(
        "_flash_attention_forward", query, key, key, None, None, LENGTH, LENGTH, 0.0, True, False
    )
    backward = flops_of(
        "_flash_attention_backward",
        query,
        query,
        key,
        key,
        query,
        None,
        None,
        None,
        LENGTH,
        LENGTH,
        0.0,
        True,
        None,
        None,
    )
    assert backward == 2.5 * forward


def test_attention_is_counted_apart_from_products() -> None:
    tracker = Tracker(Ledger())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), tracker:
        tracker.ledger.enter("forward")
        query = torch.empty(ROWS, LENGTH, HEADS, SIZE)
        torch.nn.functional.linear(query, torch.empty(SIZE, SIZE))
        aten._flash_attention_forward(
            query, query, query, None, None, LENGTH, LENGTH, 0.0, True, False
        )
    assert tracker.ledger.flops["forward", "float32"] == 2 * ROWS * LENGTH * HEADS * SIZE * SIZE
    assert (
        tracker.ledger.flops["forward", "attention:float32"]
        == 2 * ROWS * HEADS * LENGTH * LENGTH * SIZE
    )


def test_a_list_changed_in_place_is_read_and_written() -> None:
    tracker = Tracker(Ledger())
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True), tracker:
        moments = [torch.empty(256)]
        gradients = [torch.empty(256)]
        tracker.ledger.enter("optimizer")
        torch._foreach_addcmul_(moments, gradients, gradients, 0.5)
    assert tracker.ledger.moved["optimizer"] == 4 * 256 * 4


@pytest.mark.parametrize("batch", [(), (3,)])
def test_a_product_added_to_a_float32_sum_is_computed_in_its_factors_type(
    batch: tuple[int, ...],
) -> None:
    first = torch.empty(*batch, 4, 8, dtype=torch.bfloat16, device="meta")
    second = torch.empty(*batch, 8, 16, dtype=torch.bfloat16, device="meta")
    total = torch.empty(*batch, 4, 16, dtype=torch.float32, device="meta")
    operation = aten.baddbmm if batch else aten.addmm
    formula = operands.flops_of(operation, operation.default._schema.arguments)
    arguments = (total, first, second, torch.float32)  # the type to accumulate in, as TRL's head
    moved, flops, dtype = operands.cost_of(formula, (), arguments, {}, total)
    pairs = 3 if batch else 1
    assert dtype == "bfloat16"
    assert flops == pairs * 2 * 4 * 8 * 16
    assert moved == pairs * (2 * (4 * 8 + 8 * 16) + 2 * 4 * (4 * 16))
