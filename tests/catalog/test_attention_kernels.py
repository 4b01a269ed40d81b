"""Attention kernels: their names, and the shares of the peak that public tables state."""

from __future__ import annotations

import pytest

from autotune.catalog import gpus
from autotune.catalog.attention_kernels import (
    AttentionUse,
    Kernel,
    attention_rows,
    attention_share,
    kernel_of,
)

GPUS = {gpu.name: gpu for gpu in gpus()}


@pytest.mark.parametrize(
    ("implementation", "capability", "kernel"),
    [
        ("flash_attention_2", "9.0", "flash_attention_2"),
        ("kernels-community/flash-attn3", "9.0", "flash_attention_3"),
        ("flash_attention_4", "10.0", "flash_attention_4"),
        ("flex_attention", "8.0", "flex_attention"),
        ("sdpa", "9.0", "cudnn"),
        (None, "10.0", "cudnn"),
        ("sdpa", "8.0", "flash_attention_2"),
        ("sdpa", "12.0", "flash_attention_2"),
        (None, None, "flash_attention_2"),
    ],
)
def test_an_implementation_runs_a_kernel_of_its_card(
    implementation: str | None,
    capability: str | None,
    kernel: Kernel,
) -> None:
    assert kernel_of(implementation, capability) == kernel


@pytest.mark.parametrize(
    ("torch", "kernel"), [((2, 10), "flash_attention_2"), ((2, 11), "cudnn"), ((3,), "cudnn")]
)
def test_torch_prefers_cudnn_from_the_release_on_that_brings_a_current_one(
    torch: tuple[int, ...], kernel: Kernel
) -> None:
    assert kernel_of("sdpa", "9.0", torch) == kernel
    assert kernel_of("sdpa", "8.0", torch) == "flash_attention_2"


# TFLOP/s of an H200 with torch 2.11, forward and backward, 28 heads of 128, 4 for keys: the rates
# of benchmarks/results/first-light/H200/results.jsonl.
MEASURED = [
    ("cudnn", 1024, 451.8, 285.2),
    ("cudnn", 2048, 531.3, 372.8),
    ("cudnn", 4096, 519.7, 430.6),
    ("flash_attention_2", 1024, 245.2, 153.1),
    ("flash_attention_2", 2048, 276.0, 204.8),
    ("flash_attention_2", 4096, 292.6, 245.6),
]


@pytest.mark.parametrize(("kernel", "length", "forward", "backward"), MEASURED)
def test_short_rows_reach_what_an_h200_showed(
    kernel: Kernel, length: int, forward: float, backward: float
) -> None:
    share = attention_share(AttentionUse(kernel=kernel, row_tokens=length), "9.0")
    reached = 3.5 / (1 / forward + 2.5 / backward) / 989.5
    assert share.value == pytest.approx(reached, rel=0.14)
    assert share.low <= reached <= share.high


# Milliseconds of one forward and one backward pass, 32 heads of 128, one row: the table that
# attention.yaml names, of H100 SXM and B200.
PUBLISHED = [
    ("flash_attention_3", "H100", 16384, 12.739),
    ("flash_attention_3", "H100", 65536, 195.760),
    ("flash_attention_2", "H100", 16384, 23.421),
    ("flash_attention_2", "H100", 65536, 369.234),
    ("flash_attention_2", "B200", 16384, 21.808),
    ("flash_attention_2", "B200", 65536, 325.841),
    ("flash_attention_4", "B200", 16384, 6.725),
    ("flash_attention_4", "B200", 65536, 95.604),
    ("flex_attention", "H100", 16384, 51.673),
    ("flex_attention", "B200", 16384, 26.347),
]


@pytest.mark.parametrize(("kernel", "card", "length", "milliseconds"), PUBLISHED)
def test_published_times_follow_from_the_share(
    kernel: Kernel,
    card: str,
    length: int,
    milliseconds: float,
) -> None:
    gpu = GPUS[card]
    visible_pairs = length * length / 2
    forward = 4 * visible_pairs * 32 * 128
    operations = 3.5 * forward
    attention = AttentionUse(kernel=kernel, row_tokens=length)
    share = attention_share(attention, gpu.compute_capability)
    predicted = operations / (gpu.tflops["bfloat16"] * 1e12 * share.value) * 1e3
    assert predicted == pytest.approx(milliseconds, rel=0.16 if length > 16384 else 0.03)
    reached = operations / (milliseconds / 1e3) / (gpu.tflops["bfloat16"] * 1e12)
    assert share.low <= reached <= share.high


def test_a_card_without_a_row_has_a_wider_interval_around_its_neighbour() -> None:
    attention = AttentionUse(kernel="flash_attention_4")
    b200 = attention_share(attention, "10.0")
    b300 = attention_share(attention, "10.3")
    assert b300.value == b200.value
    assert b300.low == b200.low / 2
    assert b300.high == pytest.approx(1.0)  # twice 0.6, and no more than the peak


def test_every_kernel_and_capability_has_one_row() -> None:
    pairs = [
        (row.kernel, capability) for row in attention_rows() for capability in row.capabilities
    ]
    assert len(pairs) == len(set(pairs))
    for row in attention_rows():
        assert 0 < row.low <= row.value <= row.high <= 1
        assert all(source.startswith("https://") for source in row.sources)
