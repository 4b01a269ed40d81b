"""Attention of a tower over pieces of its patches: one call for each length, with the same shapes."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.10")

from tests.worker.drive import inside  # noqa: E402

LENGTHS = [4, 2, 4, 4, 2, 3]


def test_pieces_of_one_length_are_one_call() -> None:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modelling
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(hidden_size=32, num_heads=4, attn_implementation="sdpa")
    attention = modelling.Qwen2_5_VLVisionAttention(config)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    hidden, still = torch.randn(sum(LENGTHS), 32), torch.zeros(sum(LENGTHS), 8)
    given = {"cu_seqlens": ends, "position_embeddings": (still + 1, still)}
    calls: list[tuple[int, ...]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Any, *arguments: Any, **named: Any) -> Any:
        calls.append(tuple(query.shape[::2]))
        return real(query, *arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        apart = attention(hidden, **given)
        assert len(calls) == len(LENGTHS)
        inside("tracing.fake_models").join_pieces(attention)
        together = attention(hidden, **given)
    assert calls[len(LENGTHS) :] == [(3, 4), (2, 2), (1, 3)]  # pieces of each length, and that length
    assert together.shape == apart.shape
