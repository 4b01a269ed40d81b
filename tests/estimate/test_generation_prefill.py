"""Order of a prefill's allocations, against the formula of its peak."""

from __future__ import annotations

import pytest

from autotune.core.units import MIB
from autotune.estimate import model_shape
from autotune.estimate.prefill_events import prefill_events
from autotune.estimate.transformers_generation import (
    CACHE,
    prefill_sizes,
    sizes_by_name,
    transformers_generation,
)
from tests.estimate.synthetic import config_of

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize(
    "changed",
    [{}, {"intermediate_size": 96, "num_attention_heads": 16, "head_dim": 64}],
    ids=["mlp", "attention"],
)
def test_the_peak_of_the_events_is_that_of_the_formula(changed: dict[str, int]) -> None:
    config, batch, prompt = {**CONFIG, **changed}, 8, 512
    shape = model_shape.shape(config)
    cached = batch * prompt * 2 * shape.key_value_heads * shape.head_dim
    sizes = sizes_by_name(
        prefill_sizes(
            shape,
            dtype="bfloat16",
            batch=batch,
            prompt=prompt,
        ),
        cached,
        0,
    )
    prefill = prefill_events(len(shape.layers), frozenset(sizes))
    live = peak = 0
    for entry in prefill.order:
        live += sizes[prefill.names[abs(entry) - 1]] * (1 if entry > 0 else -1)
        peak = max(peak, live)
    expected = transformers_generation(
        shape,
        dtype="bfloat16",
        batch=batch,
        prompt=prompt,
        completion=1,
    )
    assert peak == pytest.approx(sum(expected.values()), rel=0.05)
    assert live == 2 * len(shape.layers) * cached
    assert {prefill.names[number - 1] for number in prefill.cache} == {CACHE}
    assert len(prefill.cache) == 2 * len(shape.layers)


def test_each_layer_makes_its_cache_before_the_next_one_begins() -> None:
    sizes = sizes_by_name(
        prefill_sizes(
            model_shape.shape(CONFIG),
            dtype="bfloat16",
            batch=8,
            prompt=512,
        ),
        1000,
        0,
    )
    prefill = prefill_events(3, frozenset(sizes))
    allocated = [prefill.names[entry - 1] for entry in prefill.order if entry > 0]
    places = [at for at, name in enumerate(allocated) if name == CACHE]
    for first, second in zip(places[1::2], places[2::2], strict=False):
        assert "wide" in allocated[first:second]


# Qwen2.5-7B in 4 bits on emulated cards, 32 prompts of 512 tokens: MiB of the blocks of 0.4 MiB and
# more in their order, from the first product on, without cuBLAS's workspace.
FOUR_BITS_ATTENTION = (
    24.5,
    112,
    112,
    56,
    112,
    0.5,
    112,
    112,
    112,
    3.5,
    16,
    3.5,
    16,
    16,
    56,
    112,
    0.5,
    16,
    16,
    16,
)
FOUR_BITS_MLP = (
    129.5,
    592,
    592,
    129.5,
    592,
    592,
    129.5,
    112,
)


def test_a_prefill_in_4_bits_has_the_blocks_of_an_emulated_one() -> None:
    """bitsandbytes 0.50 and transformers 5.23. Prompts of one length have no mask."""
    shape = model_shape.shape(config_of("Qwen/Qwen2.5-7B"))
    sizes = sizes_by_name(
        prefill_sizes(
            shape,
            dtype="bfloat16",
            batch=32,
            prompt=512,
            is_padded=False,
            unpacks_weights=True,
            adapter_rank=16,
        ),
        16 * MIB,
        0,
    )
    prefill = prefill_events(2, frozenset(sizes))
    blocks = [sizes[prefill.names[entry - 1]] / MIB for entry in prefill.order if entry > 0]
    queries = blocks.index(24.5)
    assert tuple(blocks[queries : queries + 20]) == FOUR_BITS_ATTENTION
    gate = blocks.index(129.5)
    assert tuple(blocks[gate : gate + 8]) == FOUR_BITS_MLP
    assert blocks[1:9] == [4, 8, 8, 8, 8, 8, 4, 4]  # angles, all, tables in 32 bits and in 16
