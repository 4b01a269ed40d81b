"""Stand-in for FlashAttention 3 over packed rows: what it holds, and the pairs that it counts."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from autotune.worker.tracing import attention, traced_gpu, workspaces  # noqa: E402
from tests.worker.tracing.traced_code import traced  # noqa: E402

HEADS, KV_HEADS, SIZE = 8, 2, 64
STARTS_Q = [0, 40, 100, 164]
STARTS_K = [0, 40, 140, 244]
"""A prompt of 40 tokens, and two completions that see it."""


def tensors() -> Any:
    query = torch.empty(STARTS_Q[-1], HEADS, SIZE, dtype=torch.bfloat16, requires_grad=True)
    key, value = (
        torch.empty(STARTS_K[-1], KV_HEADS, SIZE, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(2)
    )
    return (
        query,
        key,
        value,
        torch.tensor(STARTS_Q, dtype=torch.int32),
        torch.tensor(STARTS_K, dtype=torch.int32),
    )


def attend(inputs: Any, **options: Any) -> Any:
    return attention.flash3_varlen_func(*inputs, 64, 104, causal=True, **options)


@pytest.mark.parametrize("window", [-1, 0, 7, 50, 90, 1000])
def test_pairs_are_those_that_each_sequence_sees(window: int) -> None:
    counted = 0
    for at in range(3):
        queries = STARTS_Q[at + 1] - STARTS_Q[at]
        keys = STARTS_K[at + 1] - STARTS_K[at]
        for query in range(queries):
            last = keys - queries + query
            counted += last + 1 if window < 0 else min(last, window) + 1
    assert attention.pairs_of(STARTS_Q, STARTS_K, causal=True, window=window) == counted
    full_pairs = attention.pairs_of(STARTS_Q, STARTS_K, causal=False, window=-1)
    assert full_pairs == 40 * 40 + 60 * 100 + 64 * 104


def test_it_keeps_its_inputs_the_output_and_a_number_per_row() -> None:
    def code() -> Any:
        inputs = tensors()
        return inputs, attend(inputs)

    query = STARTS_Q[-1] * HEADS * SIZE * 2
    keys = 2 * STARTS_K[-1] * KV_HEADS * SIZE * 2
    starts = 2 * 4 * 4
    assert traced(code).left == 2 * query + keys + starts + STARTS_Q[-1] * HEADS * 4
    pairs = attention.pairs_of(STARTS_Q, STARTS_K, causal=True, window=-1)
    assert traced(code).flops == 4 * pairs * HEADS * SIZE


def test_its_backward_pass_has_float32_accumulators() -> None:
    """On Hopper rows are rounded up with 128 for each sequence of queries, at heads of 64, and
    of keys.
    """

    def code() -> Any:
        inputs = tensors()
        attend(inputs).backward(torch.empty(STARTS_Q[-1], HEADS, SIZE, dtype=torch.bfloat16))
        return inputs

    peaks = traced(code, {"capability": [9, 0]})
    rows = -(-(164 + 3 * 128) // 128) * 128
    keys = -(-(244 + 3 * 128) // 128) * 128
    accumulators = HEADS * rows * 4 * (2 + SIZE) + 2 * KV_HEADS * keys * SIZE * 4
    query = STARTS_Q[-1] * HEADS * SIZE * 2
    half = STARTS_K[-1] * KV_HEADS * SIZE * 2
    forward_bytes = (
        2 * query + 2 * half + 32 + STARTS_Q[-1] * HEADS * 4
    )  # inputs, output and sums of the forward pass
    assert peaks.most == forward_bytes + query + (query + 2 * half) + accumulators
    assert peaks.left == 2 * (query + 2 * half) + 32
    pairs = attention.pairs_of(STARTS_Q, STARTS_K, causal=True, window=-1)
    assert peaks.flops == 14 * pairs * HEADS * SIZE, "five products backward for two forward"


@pytest.mark.parametrize(
    ("capability", "size", "blocks"),
    [
        ((9, 0), 128, (64, 128)),
        ((9, 0), 256, (64, 80)),
        ((8, 6), 128, (64, 96)),
        ((8, 0), 64, (128, 128)),
    ],
)
def test_blocks_are_those_of_the_card(
    capability: tuple[int, int],
    size: int,
    blocks: tuple[int, int],
) -> None:
    with traced_gpu({"capability": list(capability)}):
        assert workspaces._flash3_blocks(size) == blocks
