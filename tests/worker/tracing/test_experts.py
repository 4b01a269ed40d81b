"""Mixtures of experts: grouped products do not depend on routing; the loop over experts has an
interval."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers", minversion="5.0")

from autotune.worker.tracing import experts, fake_models  # noqa: E402
from tests.worker.tracing.traced_code import traced  # noqa: E402

HIDDEN = 128
INNER = 512
COUNT = 16
CHOSEN = 2
TOKENS = 512


def config(kind: str = "qwen3_moe") -> Any:
    shared = {
        "num_hidden_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "num_experts_per_tok": CHOSEN,
        "use_cache": False,
        "output_router_logits": True,
    }
    if kind == "mixtral":
        return transformers.MixtralConfig(
            num_local_experts=COUNT, intermediate_size=INNER, **shared
        )
    if kind == "qwen2_moe":
        return transformers.Qwen2MoeConfig(
            num_experts=COUNT,
            moe_intermediate_size=INNER,
            shared_expert_intermediate_size=INNER,
            intermediate_size=INNER,
            **shared,
        )
    return transformers.Qwen3MoeConfig(
        num_experts=COUNT,
        moe_intermediate_size=INNER,
        head_dim=32,
        **shared,
    )


def model(
    kind: str,
    implementation: str | None,
    dtype: Any = torch.bfloat16,
    attention: str = "sdpa",
) -> Any:
    settings = config(kind)
    settings._experts_implementation = implementation
    return fake_models.build(settings, dtype, attention)


def traced_model(
    kind: str,
    implementation: str | None,
    *,
    routing: str = "even",
    grad: bool = True,
    dtype: Any = torch.bfloat16,
    attention: str = "sdpa",
    **spec: Any,
) -> Any:
    def code() -> Any:
        built = model(kind, implementation, dtype, attention)
        fake_models.materialise(built)
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        with (
            fake_models.real_tensor_paths(),
            experts.routed(built, {"routing": routing}),
            torch.set_grad_enabled(grad),
        ):
            loss = built(input_ids=ids, labels=ids).loss
            if grad:
                loss.backward()
        return built

    return traced(code, spec)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "qwen2_moe"])
def test_grouped_products_do_not_depend_on_routing(kind: str) -> None:
    even = traced_model(kind, None)
    worst = traced_model(kind, None, routing="one")
    assert even.most == worst.most
    assert not experts.depends_on_routing(model(kind, None))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_all_implementations_do_the_same_work(kind: str) -> None:
    grouped = traced_model(kind, None)
    looped = traced_model(kind, "eager")
    assert grouped.flops == pytest.approx(looped.flops, rel=0.001)
    assert looped.flops == pytest.approx(
        traced_model(kind, "eager", routing="one").flops, rel=0.001
    )


def test_the_loop_over_experts_has_an_interval() -> None:
    """Without gradients one expert's share is live: an even one, or every token."""
    even, worst = (
        traced_model("qwen3_moe", "eager", routing=routing, grad=False)
        for routing in ("even", "one")
    )
    share = TOKENS * CHOSEN // COUNT
    per_token = 2 * (
        2 * INNER + INNER + INNER
    )  # gate and up together, the activated gate, the product
    assert worst.most - even.most == pytest.approx((TOKENS - share) * per_token, rel=0.25)
    assert experts.depends_on_routing(model("qwen3_moe", "eager"))


def test_a_gpu_without_grouped_products_loops_over_rows() -> None:
    old = traced_model("qwen3_moe", None, capability=(7, 5))
    assert old.flops == pytest.approx(
        traced_model("qwen3_moe", "eager", capability=(7, 5)).flops, rel=0.001
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_weights_in_float32_are_grouped_too(device: str) -> None:
    # torch's fused attention of float32 and bfloat16 is not the same kernel, and counts other
    # FLOPs.
    wide = traced_model(
        "qwen3_moe",
        None,
        dtype=torch.float32,
        device=device,
        attention="eager",
    )
    narrow = traced_model("qwen3_moe", None, device=device, attention="eager")
    assert wide.flops == pytest.approx(narrow.flops, rel=0.001)
    assert narrow.left < wide.left < 2.1 * narrow.left


def test_a_dense_model_is_unchanged() -> None:
    dense = transformers.Qwen2Config(
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=64,
    )
    dense_model = fake_models.build(dense, torch.bfloat16, "sdpa")
    assert experts.routing_of(dense_model) is None
    with experts.routed(dense_model, {}):
        assert not experts.depends_on_routing(dense_model)
    assert experts.routing_of(model("mixtral", None)) == (COUNT, CHOSEN)
