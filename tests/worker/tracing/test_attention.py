"""CUDA's attention kernels: choice, saved tensors, and memory inside."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from autotune.worker import releases  # noqa: E402
from autotune.worker.tracing import attention, traced_gpu, workspaces  # noqa: E402
from tests.worker.tracing.traced_code import traced  # noqa: E402

BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32
A100 = (8, 0)
T4 = (7, 5)
H100 = (9, 0)
RTX4090 = (8, 9)


def chosen(
    capability: Any,
    dtype: Any,
    *,
    size: int = 64,
    heads: int = 8,
    kv_heads: int = 8,
    mask: Any = None,
    length: int = 16,
    dropout: float = 0.0,
    grad: bool = True,
    gqa: bool = False,
    keys: int = 16,
) -> str:
    q = torch.empty(
        2,
        heads,
        length,
        size,
        dtype=dtype,
        device="meta",
        requires_grad=grad,
    )
    k = torch.empty(2, kv_heads, keys, size, dtype=dtype, device="meta")
    with traced_gpu({"capability": capability}):
        return attention.choose(q, k, k, mask, dropout, mask is None, gqa)


SEEDS = {"flash": 24, "efficient": 16}
"""Bytes of the generator's state that a kernel returns too."""

MASK = torch.ones(2, 1, 16, 16, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("kernel", "capability", "dtype", "how"),
    [
        ("flash", A100, BF16, {}),
        ("flash", A100, FP16, {"size": 256}),
        ("flash", A100, BF16, {"kv_heads": 2, "gqa": True}),
        ("efficient", A100, BF16, {"mask": MASK}),
        ("efficient", A100, FP32, {}),
        ("efficient", A100, BF16, {"size": 264}),
        ("math", A100, BF16, {"kv_heads": 2}),
        ("math", A100, BF16, {"mask": MASK, "kv_heads": 2, "gqa": True}),
        ("math", A100, BF16, {"mask": MASK, "size": 60}),
        ("math", A100, torch.float64, {}),
        ("efficient", A100, BF16, {"keys": 32}),
        ("efficient", T4, FP16, {}),
        ("math", T4, BF16, {}),
        ("efficient", T4, FP32, {}),
        ("flash", RTX4090, BF16, {"size": 128}),
        ("efficient", RTX4090, BF16, {"size": 200}),
        ("flash", RTX4090, BF16, {"size": 200, "grad": False}),
        ("efficient", RTX4090, BF16, {"size": 256, "dropout": 0.1}),
    ],
)
def test_the_kernel(
    kernel: str,
    capability: Any,
    dtype: Any,
    how: dict[str, Any],
) -> None:
    assert chosen(capability, dtype, **how) == kernel


@pytest.mark.parametrize(
    ("version", "kernel"),
    [
        ("2.9.1+cu128", "flash"),
        ("2.10.0", "flash"),
        ("2.11.0", "cudnn"),
        ("2.13.0+cpu", "cudnn"),
    ],
)
def test_hopper_uses_cudnn_since_the_wheels_of_torch_2_11(
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    kernel: str,
) -> None:
    monkeypatch.setattr(releases, "version", lambda package: version)
    assert chosen(H100, BF16) == kernel
    assert chosen(A100, BF16) == "flash"
    assert chosen(H100, FP32) == "efficient"


def attend(q: Any, k: Any, mask: Any = None, **how: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, k, attn_mask=mask, is_causal=mask is None, **how
    )


def rows(
    batch: int,
    length: int,
    heads: int,
    size: int,
    dtype: Any = BF16,
) -> Any:
    """Tensors as projections return them: heads side by side in a row."""
    return torch.empty(batch, length, heads, size, dtype=dtype, requires_grad=True).transpose(1, 2)


def kept_by(code: Any, capability: Any = A100) -> int:
    """Return the bytes saved after the forward pass, without the operands."""
    operands = traced(lambda: code(None), {"capability": capability}).left
    return traced(lambda: code(attend), {"capability": capability}).left - operands


def test_flash_saves_its_output_and_one_number_per_row() -> None:
    def code(call: Any) -> Any:
        q = rows(2, 96, 8, 64)
        k = rows(2, 96, 2, 64)
        return q, k, call and call(q, k, enable_gqa=True)

    output = 2 * 96 * 8 * 64 * 2
    sums = 2 * 8 * 96 * 4
    assert kept_by(code) == output + sums + SEEDS["flash"]


def test_the_efficient_kernel_saves_the_expanded_mask() -> None:
    def code(call: Any, length: int = 96) -> Any:
        q = rows(2, length, 8, 64)
        k = rows(2, length, 8, 64)
        mask = torch.ones(2, 1, length, length, dtype=torch.bool)
        return q, k, mask, call and call(q, k, mask)

    output = 2 * 96 * 8 * 64 * 2
    sums = 2 * 8 * 96 * 4
    mask = 2 * 96 * 96 * 2
    assert kept_by(code) == output + sums + mask + SEEDS["efficient"]
    odd = kept_by(
        lambda call: code(call, 77)
    )  # rows of the mask begin at multiples of 8, log-sum-exp at multiples of 32
    output = 2 * 77 * 8 * 64 * 2
    mask = 2 * 77 * 80 * 2
    assert odd == output + sums + mask + SEEDS["efficient"]


def test_the_math_kernel_saves_the_scores() -> None:
    def code(call: Any) -> Any:
        q = rows(1, 64, 4, 32, torch.float64)
        k = rows(1, 64, 4, 32, torch.float64)
        return q, k, call and call(q, k)

    assert kept_by(code) > 1 * 4 * 64 * 64 * 8


def test_nothing_is_saved_without_a_backward_pass() -> None:
    def code(call: Any) -> Any:
        q = rows(2, 96, 8, 64)
        k = rows(2, 96, 8, 64)
        mask = torch.ones(2, 1, 96, 96, dtype=torch.bool)
        with torch.no_grad():
            return q, k, mask, call and call(q, k, mask)

    assert kept_by(code) == 2 * 96 * 8 * 64 * 2


def test_autocast_applies_before_the_choice_of_kernel() -> None:
    def code(call: Any) -> Any:
        q = rows(2, 96, 8, 64, FP32)
        with torch.autocast("cuda", dtype=BF16):
            out = call and call(q, q)
        assert out is None or out.dtype is BF16
        return q, out

    output = 2 * 96 * 8 * 64 * 2
    narrow_copy = output
    sums = 2 * 8 * 96 * 4
    assert kept_by(code) >= output + narrow_copy + sums


def test_the_operation_is_restored() -> None:
    q = torch.randn(1, 2, 8, 16)
    before = attend(q, q)
    traced(lambda: attend(rows(1, 8, 2, 16), rows(1, 8, 2, 16)))
    assert torch.equal(attend(q, q), before)


def meta(*shape: int, dtype: Any = BF16) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_flash_backward_inside() -> None:
    """Rows rounded up to 128, head to 32; dk and dv per query head under grouped queries."""
    q = meta(2, 100, 8, 80).transpose(1, 2)
    k = meta(2, 100, 2, 80).transpose(1, 2)
    table = workspaces.ON_CUDA[torch.ops.aten._scaled_dot_product_flash_attention_backward.default]
    accumulators = 2 * 8 * 128 * (96 + 1) * 4
    grouped = table(workspaces.OperationCall((q, q, k, k), {}, None))
    keys_and_values = 2 * 2 * 8 * 100 * 80 * 2
    assert sum(grouped) == accumulators + keys_and_values  # type: ignore[arg-type]
    assert table(workspaces.OperationCall((q, q, q, q), {}, None)) == (
        2 * 8 * 128 * 4,
        2 * 8 * 128 * 96 * 4,
    )  # blocks of their own
    copied = table(workspaces.OperationCall((meta(2, 8, 100, 80), q, q, q), {}, None))
    assert sum(copied) == accumulators + 2 * 100 * 8 * 80 * 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capability", "size", "rows_", "columns"),
    [
        (A100, 128, 128, 128),
        (A100, 64, 64, 64),
        (H100, 128, 128, 128),
        (RTX4090, 64, 64, 64),
    ],
)
def test_efficient_backward_inside(
    capability: Any,
    size: int,
    rows_: int,
    columns: int,
) -> None:
    """Tiles of float32 for dq with a header of 16 bytes each, and one number per row."""
    q = meta(2, 300, 8, size).transpose(1, 2)
    table = workspaces.ON_CUDA[
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    ]
    with traced_gpu({"capability": capability}):
        allocated = table(workspaces.OperationCall((q, q, q, q), {}, None))
    tiles = math.ceil(300 / rows_) * math.ceil(size / columns) * (16 + rows_ * columns * 4)
    assert allocated == 2 * 8 * (tiles + 300 * 4)


def test_efficient_backward_splits_the_keys_beyond_the_registers() -> None:
    q = meta(1, 512, 2, 128).transpose(1, 2)
    table = workspaces.ON_CUDA[
        torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    ]
    with traced_gpu({"capability": RTX4090}):
        allocated = table(workspaces.OperationCall((q, q, q, q), {}, None))
    tiles = 8 * 2 * (16 + 64 * 64 * 4)
    splits = 8
    assert allocated == 1 * 2 * (tiles + splits * 64 * (128 + 128) * 4 + 512 * 4)


def test_workspaces_are_freed_within_the_operation() -> None:
    def backward() -> Any:
        q = rows(2, 96, 8, 64)
        attend(q, q).sum().backward()

    peaks = traced(backward)
    assert peaks.most > peaks.left + 2 * 8 * 128 * (64 + 1) * 4
