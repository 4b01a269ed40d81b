"""Policy losses of a stand-in step on real tensors: saved tensors and gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from autotune.worker.stand_in.losses import (  # noqa: E402
    ENTROPIES,
    HEADS,
    LOSSES,
    fuse_head,
    policy_loss,
)

ROWS, LENGTH, WORDS = 2, 5, 11


def answered(dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    """Return weights, a model output with logits that require gradients, and labels."""
    weights = torch.randn(ROWS, LENGTH, WORDS, dtype=dtype, requires_grad=True)
    return weights, SimpleNamespace(logits=weights * 1), torch.randint(0, WORDS, (ROWS, LENGTH))


@pytest.mark.parametrize("loss", LOSSES[1:])
@pytest.mark.parametrize("entropy", [None, *ENTROPIES])
def test_each_loss_has_a_gradient_of_the_logits(loss: str, entropy: str | None) -> None:
    weights, out, labels = answered(torch.bfloat16)
    policy_loss(
        out,
        labels,
        loss,
        {"entropy": entropy, "entropy_chunk": 4, "widened": loss == "logprobs_kernel"},
    ).backward()
    assert (
        weights.grad is not None
        and weights.grad.dtype is torch.bfloat16
        and weights.grad.shape == weights.shape
    )
    assert out.logits is None


@pytest.mark.parametrize("in_place", [True, False])
def test_the_kernels_gradient_may_overwrite_the_logits(in_place: bool) -> None:
    _, out, labels = answered()
    logits = out.logits
    seen: list[int] = []
    logits.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    policy_loss(out, labels, "logprobs_kernel", {"in_place": in_place}).backward()
    assert (seen == [logits.data_ptr()]) is in_place


def test_saved_logits_by_loss() -> None:
    def kept(loss: str, **options: bool) -> int:
        _, out, labels = answered(torch.bfloat16)
        logits = out.logits
        held: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: (held.append(one), one)[1], lambda one: one
        ):
            policy_loss(out, labels, loss, options)
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held
        }
        storages.pop(logits.untyped_storage().data_ptr(), None)
        return sum(size for size in storages.values() if size > ROWS * LENGTH * 8)

    assert kept("logprobs_kernel") == 0
    narrow, wide = kept("logprobs_plain"), kept("logprobs")
    assert narrow > 0 and wide == 2 * narrow


def test_log_probabilities_token_by_token_keep_them_in_float32() -> None:
    _, out, labels = answered(torch.bfloat16)
    held: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: (held.append(one), one)[1], lambda one: one
    ):
        policy_loss(out, labels, "logprobs_tokens", {})
    wide = {
        one.untyped_storage().data_ptr(): one
        for one in held
        if one.dtype is torch.float32 and one.numel() == WORDS
    }
    assert len(wide) == ROWS * LENGTH


@pytest.mark.parametrize(
    ("package", "user", "falls_back"),
    [("no_kernel", "torch", True), ("torch", "torch", False), ("no_kernel", "no_user", False)],
)
def test_an_environment_with_the_framework_and_without_the_kernel_computes_token_by_token(
    package: str,
    user: str,
    falls_back: bool,
) -> None:
    _, out, labels = answered(torch.bfloat16)
    held: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: (held.append(one), one)[1], lambda one: one
    ):
        policy_loss(
            out, labels, "logprobs_kernel", {"kernel_package": package, "kernel_user": user}
        )
    assert any(one.dtype is torch.float32 and one.shape == (WORDS,) for one in held) is falls_back


def test_rows_cut_out_of_padded_ones_are_copied_with_their_logits() -> None:
    weights, out, labels = answered()
    logits = out.logits
    held: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: (held.append(one), one)[1], lambda one: one
    ):
        policy_loss(out, labels, "logprobs_kernel", {"copied": True}).backward()
    copies = [one for one in held if one.numel() == logits.numel()]
    assert copies and all(
        one.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr() for one in copies
    )
    assert weights.grad is not None


def test_an_entropy_in_chunks_keeps_nothing_unless_it_is_a_loss() -> None:
    def kept(**options: Any) -> int:
        _, out, labels = answered(torch.bfloat16)
        held: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: (held.append(one), one)[1], lambda one: one
        ):
            policy_loss(out, labels, "logprobs_kernel", {**options})
        return sum(
            one.nbytes for one in held if one.dtype is torch.float32 and one.numel() >= WORDS
        )

    assert (
        kept(
            entropy="log_softmax",
            entropy_chunk=4,
            entropy_frozen=True,
        )
        == 0
    )
    assert kept(entropy="log_softmax", entropy_chunk=4) >= 2 * ROWS * LENGTH * WORDS * 4
    assert kept(entropy="softmax", entropy_chunk=4) >= 2 * ROWS * LENGTH * WORDS * 4
    assert kept(entropy="compiled", entropy_chunk=4) == 0


def test_an_entropy_in_chunks_is_the_same() -> None:
    logits = torch.randn(ROWS, LENGTH, WORDS)
    whole = ENTROPIES["softmax"](logits, 0).reshape(-1)
    for kind in ("softmax", "log_softmax"):
        assert torch.allclose(ENTROPIES[kind](logits, 3), whole, atol=1e-5)


def test_an_entropy_under_autocast_keeps_its_shares_in_float32() -> None:
    def kept(**options: Any) -> int:
        _, out, labels = answered(torch.bfloat16)
        held: list[Any] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda one: (held.append(one), one)[1], lambda one: one
        ):
            policy_loss(out, labels, "logprobs_kernel", {"entropy": "softmax", **options})
        return sum(
            one.nbytes
            for one in held
            if one.dtype is torch.float32 and one.numel() == ROWS * LENGTH * WORDS
        )

    assert kept() == 0 and kept(entropy_widened=True) >= ROWS * LENGTH * WORDS * 4


@pytest.mark.parametrize("kind", HEADS)
def test_a_fused_head_keeps_no_logits(kind: str) -> None:
    head = torch.nn.Linear(4, WORDS, bias=False)
    fuse_head(SimpleNamespace(get_output_embeddings=lambda: head), {"head": kind, "chunk": 3})
    hidden = torch.randn(ROWS, LENGTH, 4, requires_grad=True)
    held: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: (held.append(one), one)[1], lambda one: one
    ):
        policy_loss(
            SimpleNamespace(logits=head(hidden)), torch.zeros(ROWS, LENGTH), "logprobs_fused", {}
        ).backward()
    assert max(one.numel() for one in held) <= max(hidden.numel(), head.weight.numel())
    assert hidden.grad is not None and hidden.grad.shape == hidden.shape
    assert head.weight.grad is not None and head.weight.grad.shape == head.weight.shape


def test_offloaded_activations_stay_on_the_device_up_to_a_number() -> None:
    import gc
    import weakref

    from autotune.worker.stand_in.step import offloaded

    live: list[Any] = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, value: Any) -> Any:
            made = value * 2
            live.append(weakref.ref(made))
            context.save_for_backward(made)
            return made.sum()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            (made,) = context.saved_tensors
            return made * gradient

    weights = torch.randn(1024, requires_grad=True)
    for in_flight, kept in ((None, 4), (2, 2)):
        live.clear()
        with offloaded(in_flight):
            total = sum(Keeps.apply(weights) for _ in range(4))
        gc.collect()
        assert sum(one() is not None for one in live) == kept
        total.backward()


def test_an_entropy_that_is_only_logged_holds_its_tensors_after_the_backward_pass() -> None:
    weights, out, labels = answered()
    plain, again = SimpleNamespace(logits=weights * 1), out.logits
    policy_loss(plain, labels, "logprobs_plain", {}).backward()
    expected, weights.grad = weights.grad, None
    loss = policy_loss(SimpleNamespace(logits=again), labels, "logprobs_plain", {"held": 0.5})
    loss.backward()
    torch.testing.assert_close(weights.grad, expected)
    logits, logs, chosen = loss.grad_fn.tensors
    assert logits.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
    assert logs.shape == (ROWS, LENGTH - 1, WORDS)
    assert chosen.shape == (round(0.5 * ROWS * (LENGTH - 1)), WORDS)
