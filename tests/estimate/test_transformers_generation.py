"""Memory of transformers' generation, predicted and counted on real tensors."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from autotune.estimate.model_shape import shape
from autotune.estimate.transformers_generation import transformers_generation
from tests.estimate.synthetic import SMALL_QWEN


def test_parts_equal_the_formula() -> None:
    parts = transformers_generation(
        shape(SMALL_QWEN),
        dtype="bfloat16",
        batch=8,
        prompt=64,
        completion=448,
    )
    per_token = 2 * 2 * 32 * 2 * 4  # keys and values, two heads of 32, bfloat16, four layers
    assert parts["kv_cache"] == 8 * 511 * per_token


def test_large_logits_are_held_three_times() -> None:
    config = {**SMALL_QWEN, "vocab_size": 151_936}
    parts = transformers_generation(
        shape(config),
        dtype="bfloat16",
        batch=8,
        prompt=16,
        completion=64,
    )
    assert parts["logits"] == 8 * 151_936 * (2 + 4 + 4 + 4)


def test_long_prompts_peak_in_the_prefill() -> None:
    parts = transformers_generation(
        shape(SMALL_QWEN),
        dtype="bfloat16",
        batch=8,
        prompt=2048,
        completion=2,
    )
    assert parts["activations"] > parts["kv_cache"] and parts["logits"] == 0


def test_a_window_bounds_the_cache() -> None:
    windowed = {**SMALL_QWEN, "model_type": "mistral", "sliding_window": 128}

    def cache_of(completion: int) -> int:
        return transformers_generation(
            shape(windowed),
            dtype="float32",
            batch=2,
            prompt=256,
            completion=completion,
        )["kv_cache"]

    short, long = cache_of(1024), cache_of(2048)
    assert short == long


MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "changes", "shapes"),
    [
        ("qwen2", {}, (4, 32, 200)),
        ("qwen2", {}, (8, 512, 8)),
        ("qwen2", {"tie_word_embeddings": True}, (8, 512, 8)),
        ("qwen2", {"vocab_size": 60_000}, (4, 16, 32)),
        ("qwen2", {"num_hidden_layers": 1, "num_key_value_heads": 4}, (4, 32, 200)),
        ("qwen3", {"head_dim": 32}, (4, 32, 150)),
        ("gemma2", {"head_dim": 32, "sliding_window": 64}, (4, 32, 150)),
        ("mistral", {"sliding_window": 64}, (4, 200, 100)),
        ("qwen3_moe", MOE, (8, 256, 8)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prediction_equals_the_count(
    kind: str,
    changes: Mapping[str, object],
    shapes: tuple[int, int, int],
    dtype: str,
) -> None:
    """Within 2 percent."""
    config = {**SMALL_QWEN, **changes, "model_type": kind}
    batch, prompt, completion = shapes
    peak = _really_held(config, shapes, dtype=dtype)
    parts = transformers_generation(
        shape(config),
        dtype=dtype,
        batch=batch,
        prompt=prompt,
        completion=completion,
    )
    assert sum(parts.values()) == pytest.approx(peak, rel=0.02)


def _really_held(
    config: Mapping[str, object],
    shapes: tuple[int, int, int],
    *,
    dtype: str,
) -> int:
    """Peak of the installed transformers' generation on real tensors, the model excluded."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    batch, prompt, completion = shapes
    fields: dict[str, Any] = {
        name: value for name, value in config.items() if name != "model_type"
    } | {"eos_token_id": None}
    model_config = CONFIG_MAPPING[str(config["model_type"])](**fields)
    model = AutoModelForCausalLM.from_config(model_config, dtype=getattr(torch, dtype)).eval()
    ids = torch.randint(5, 500, (batch, prompt))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    settings = GenerationConfig(
        max_new_tokens=completion,
        do_sample=True,
        eos_token_id=None,
        pad_token_id=0,
        disable_compile=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    with torch.no_grad(), _counting() as counted:
        written = model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=settings,
        )
    assert written.shape[1] == prompt + completion
    return counted["peak"]


@contextmanager
def _counting() -> Iterator[dict[str, int]]:
    """Peak of the bytes of storages made inside."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    counted = {"live": 0, "peak": 0}
    live_storages: set[int] = set()

    def gone(key: int, size: int) -> None:
        live_storages.discard(key)
        counted["live"] -= size

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: Any = (),
            kwargs: Any = None,
        ) -> Any:
            import torch

            before = {
                leaf.untyped_storage()._cdata
                for leaf in tree_leaves((args, kwargs))
                if isinstance(leaf, torch.Tensor)
            }
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if not isinstance(leaf, torch.Tensor):
                    continue
                storage = leaf.untyped_storage()
                if storage._cdata in live_storages or storage._cdata in before:
                    continue
                live_storages.add(storage._cdata)
                counted["live"] += storage.nbytes()
                counted["peak"] = max(counted["peak"], counted["live"])
                weakref.finalize(storage, gone, storage._cdata, storage.nbytes())
            return out

    with Counting():
        yield counted
