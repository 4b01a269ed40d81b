"""TRL's offloaded activations: what stays on the device until the backward pass."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
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
    kept = len(hooks._stash)
    loss.backward()
    assert not hooks._stash, "the backward pass takes every tensor back"
    return kept


def test_only_the_last_few_stay_and_gradients_have_their_shapes() -> None:
    model = Model()
    assert 0 < kept_by(fake_models.offloaded_activations(model), model) <= fake_models.STASH < LAYERS
    assert all(parameter.grad is not None and parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_what_is_saved_twice_in_a_row_and_what_is_small_stays() -> None:
    hooks, value, small = fake_models.OffloadedActivations(), torch.randn(64, 64), torch.randn(4)
    assert isinstance(hooks._pack(value), fake_models._OnHost)
    assert hooks._pack(value) is value and hooks._pack(small) is small
    weight = torch.nn.Parameter(value.clone())
    assert hooks._pack(weight) is weight and isinstance(hooks._pack(weight.t()), torch.Tensor), "a view of a parameter"


def test_the_constants_are_those_of_trl() -> None:
    import inspect

    given = inspect.signature(OffloadActivations.__init__).parameters
    assert given["min_offload_size"].default == fake_models.MIN_OFFLOADED_BYTES
    assert given["max_fwd_stash_size"].default == fake_models.STASH
