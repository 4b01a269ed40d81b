"""Stub of the flash-attention package, used by transformers."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

from autotune.worker.tracing import fake_models  # noqa: E402
from tests.worker.tracing.traced_code import traced  # noqa: E402

HEADS = 4
KV_HEADS = 2
SIZE = 32
LAYERS = 2
BATCH = 2
LENGTH = 96


def model(attention: str) -> Any:
    config = transformers.Qwen2Config(
        hidden_size=HEADS * SIZE,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        vocab_size=512,
        use_cache=False,
    )
    built = fake_models.build(config, torch.bfloat16, attention)
    fake_models.materialise(built)
    return built


def forward(
    attention: str,
    padded: bool = False,
    packed: bool = False,
    train: bool = True,
) -> Any:
    def code() -> Any:
        built = model(attention)
        inputs: dict[str, Any] = {"input_ids": torch.zeros(BATCH, LENGTH, dtype=torch.long)}
        if padded:
            inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
            inputs["attention_mask"][0, :16] = 0
        if packed:
            inputs = {"input_ids": torch.zeros(1, BATCH * LENGTH, dtype=torch.long)}
            inputs["position_ids"] = torch.arange(LENGTH).repeat(BATCH)[None]
        with torch.set_grad_enabled(train), fake_models.real_tensor_paths():
            return built, built(**inputs).logits

    return traced(code)


def test_it_saves_the_same_as_sdpas_flash_kernel() -> None:
    assert forward("flash_attention_2").left == pytest.approx(forward("sdpa").left, rel=0.001)


def test_eager_saves_the_scores_too() -> None:
    scores = LAYERS * BATCH * HEADS * LENGTH * LENGTH * 2
    assert forward("eager").left > forward("flash_attention_2").left + scores


def test_a_padded_batch_has_no_mask_over_pairs() -> None:
    """Tokens are packed; with sdpa a mask over all pairs is widened and saved."""
    tokens = BATCH * LENGTH - 16
    flash = forward("flash_attention_2", padded=True)
    assert flash.left != forward("flash_attention_2").left
    kept_rows = LAYERS * tokens * (HEADS + 2 * KV_HEADS + HEADS) * SIZE * 2
    assert flash.left > forward("sdpa", padded=True, train=False).left + kept_rows


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"padded": True},
        {"packed": True},
    ],
)
def test_the_backward_pass_runs(how: dict[str, Any]) -> None:
    def code() -> None:
        built = model("flash_attention_2")
        batch = (1, BATCH * LENGTH) if "packed" in how else (BATCH, LENGTH)
        mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
        mask[0, :16] = 0
        inputs = {"attention_mask": mask} if "padded" in how else {}
        inputs |= (
            {"position_ids": torch.arange(LENGTH).repeat(BATCH)[None]} if "packed" in how else {}
        )
        with fake_models.real_tensor_paths():
            built(input_ids=torch.zeros(*batch, dtype=torch.long), **inputs).logits.sum().backward()
        assert all(parameter.grad is not None for parameter in built.parameters())

    assert traced(code).flops > 0


def test_the_stub_is_removed() -> None:
    from transformers.utils import is_flash_attn_2_available

    before = sys.modules.get("flash_attn"), is_flash_attn_2_available()
    forward("flash_attention_2")
    assert (sys.modules.get("flash_attn"), is_flash_attn_2_available()) == before
