"""Cards, attention kernels and precisions that no measured run was compared with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune import catalog
from autotune.catalog.attention_kernels import attention_rows
from autotune.core.prediction import Prediction
from autotune.core.trace import Trace, Work
from autotune.estimate.throughput.uncompared_cards import (
    commonest_dtype,
    uncompared_cards,
    uncompared_parts,
    widened,
)
from tests.estimate.synthetic import Book
from tests.estimate.test_uncompared_cards import PREDICTION

GPUS = {gpu.name: gpu for gpu in catalog.gpus()}


def step(dtype: str = "bfloat16", *, attention: bool = True) -> Trace:
    """Return a step with products in this precision, and attention in it."""
    flops = {dtype: 1e12}
    if attention:
        flops[f"attention:{dtype}"] = 1e11
    work = Work(phase="forward", flops=flops, moved_bytes=1.0, kernels=1)
    return replace(Book().trace(), work=(work,))


def parts(gpu: str, attention: str | None = None, trace: Trace | None = None) -> list[str]:
    return list(uncompared_parts(trace or step(), attention, GPUS[gpu]))


@pytest.mark.parametrize(
    "gpu, attention",
    [
        ("A100-80G", None),  # FlashAttention 2 through SDPA
        ("A100-80G", "flash_attention_2"),
        ("H100", None),  # cuDNN
        ("H100", "flash_attention_3"),
        ("H200", "kernels-community/vllm-flash-attn3"),
        ("B200", "flash_attention_2"),
        ("A6000", "sdpa"),
    ],
)
def test_kernels_and_cards_with_rows_are_compared(gpu: str, attention: str | None) -> None:
    assert uncompared_cards(GPUS[gpu]) == ()
    assert parts(gpu, attention) == []


def test_every_card_without_rows_is_named() -> None:
    """The page of `speed_rows` is what a card was compared with."""
    for name, gpu in GPUS.items():
        expected = () if gpu.speed_rows else (f"a {name}",)
        assert uncompared_cards(gpu) == expected


def test_a_kernel_of_other_cards_is_named_where_the_step_runs_it() -> None:
    """FlexAttention has rows of Hopper and Blackwell: none of an A100."""
    capabilities = set()
    for row in attention_rows():
        if row.kernel == "flex_attention":
            capabilities.update(row.capabilities)
    assert capabilities == {"9.0", "10.0"}
    assert parts("A100-80G", "flex_attention") == ["flex_attention on a A100-80G"]
    assert parts("A100-80G", "flex_attention", step(attention=False)) == []


def test_products_outside_half_precision_are_named() -> None:
    assert commonest_dtype(step("float32")) == "float32"
    assert parts("A100-80G", None, step("float32")) == ["products in float32"]


def test_a_step_without_products_names_none() -> None:
    trace = replace(Book().trace(), work=())
    assert commonest_dtype(trace) is None
    assert parts("A100-80G", None, trace) == []


def test_what_was_never_compared_is_in_the_answer() -> None:
    prediction: Prediction = widened(PREDICTION, (), ("flex_attention on a A100-80G",))
    assert prediction.speed_never_compared == ("flex_attention on a A100-80G",)
    [sentence] = prediction.assumptions
    assert "flex_attention on a A100-80G was never compared" in sentence
    before = PREDICTION.tokens_per_second
    after = prediction.tokens_per_second
    assert before is not None
    assert after is not None
    assert after.low <= before.low / 2
    assert after.high >= before.high * 2
