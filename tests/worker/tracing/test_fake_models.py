"""TRL's offloaded activations: what stays on the device until the backward pass. Vision towers."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
trl = pytest.importorskip("trl")

from trl.models.activation_offloading import OffloadActivations  # noqa: E402

from autotune.worker.tracing import fake_models  # noqa: E402

WIDTH, LAYERS = 64, 8


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.lm_head = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, value):  # type: ignore[no-untyped-def]
        for layer in self.layers:
            value = torch.nn.functional.silu(layer(value))
        return self.lm_head(value)


def kept_by(hooks: fake_models.OffloadedActivations, model: Model) -> int:
    """Return the saved tensors that are on the device between the passes."""
    with hooks:
        loss = model(torch.randn(4, WIDTH)).pow(2).sum()
    stashed = len(hooks._stash)
    loss.backward()
    assert not hooks._stash, "the backward pass takes every tensor back"
    return stashed


def test_only_the_last_few_stay_and_gradients_have_their_shapes() -> None:
    model = Model()
    assert (
        0 < kept_by(fake_models.offloaded_activations(model), model) <= fake_models.STASH < LAYERS
    )
    assert all(
        parameter.grad is not None and parameter.grad.shape == parameter.shape
        for parameter in model.parameters()
    )


def test_what_is_saved_twice_in_a_row_and_what_is_small_stays() -> None:
    hooks = fake_models.OffloadedActivations()
    value = torch.randn(64, 64)
    small = torch.randn(4)
    assert isinstance(hooks._pack(value), fake_models._OnHost)
    assert hooks._pack(value) is value
    assert hooks._pack(small) is small
    weight = torch.nn.Parameter(value.clone())
    assert hooks._pack(weight) is weight and isinstance(hooks._pack(weight.t()), torch.Tensor), (
        "a view of a parameter"
    )


def test_the_constants_are_those_of_trl() -> None:
    import inspect

    parameters = inspect.signature(OffloadActivations.__init__).parameters
    assert parameters["min_offload_size"].default == fake_models.MIN_OFFLOADED_BYTES
    assert parameters["max_fwd_stash_size"].default == fake_models.STASH


LENGTHS = [4, 2, 4, 4, 2, 3]


def test_pieces_of_one_length_are_one_call() -> None:
    """Attention of a vision tower over pieces of its patches: one call for each length, with the
    same shapes.
    """
    pytest.importorskip("transformers", minversion="5.10")
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modelling
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig

    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(
        hidden_size=32,
        num_heads=4,
        attn_implementation="sdpa",
    )
    attention = modelling.Qwen2_5_VLVisionAttention(config)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    hidden = torch.randn(sum(LENGTHS), 32)
    still = torch.zeros(sum(LENGTHS), 8)
    arguments = {"cu_seqlens": ends, "position_embeddings": (still + 1, still)}
    calls: list[tuple[int, ...]] = []
    real = torch.nn.functional.scaled_dot_product_attention

    def counted(query: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(tuple(query.shape[::2]))
        return real(query, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
        apart = attention(hidden, **arguments)
        assert len(calls) == len(LENGTHS)
        fake_models.join_pieces(attention)
        together = attention(hidden, **arguments)
    assert calls[len(LENGTHS) :] == [
        (3, 4),
        (2, 2),
        (1, 3),
    ]  # pieces of each length, and that length
    assert together.shape == apart.shape
