"""Models of 2025 and 2026, cut to a few layers: every one is traced, with the parameters of its
shape.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.10")

from autotune import catalog
from autotune.estimate.model_shape import shape
from autotune.worker.stand_in import trace as stand_in
from autotune.worker.tracing import Untraceable

FAMILIES = (
    "qwen3_5",
    "qwen3_next",
    "qwen3_vl",
    "qwen2_5_vl",
    "gemma4",
    "glm4_moe",
    "glm_moe",
    "llama4",
    "granitemoe",
    "deepseek",
)
MODELS = [
    known_model
    for known_model in catalog.models()
    if str(known_model.config["model_type"]).startswith(FAMILIES)
]
FIRST_OF_TYPE = {
    known_model.config["model_type"]: known_model.ids[0] for known_model in reversed(MODELS)
}
"""One model of each type is traced in every run, the others in `make test-long`."""

LAYERS = 4
SHARING_LAYERS = 16  # Gemma 4 E2B and E4B: one layer beside those with caches of their own, or more


def layers_of(config: Any) -> int:
    return (
        SHARING_LAYERS if config.get("text_config", config).get("num_kv_shared_layers") else LAYERS
    )


def cut(config: Any, layers: int) -> dict[str, Any]:
    """The config with the first layers alone, as a short trace builds it."""
    shortened = copy.deepcopy(dict(config))
    text = shortened.get("text_config", shortened)
    every = text["num_hidden_layers"]
    text |= {
        name: value[:layers]
        for name, value in text.items()
        if isinstance(value, list) and len(value) == every
    }
    text["num_hidden_layers"] = layers
    if text.get("num_kv_shared_layers"):
        text["num_kv_shared_layers"] = max(0, text["num_kv_shared_layers"] - (every - layers))
    return shortened


def specification(known_model: catalog.KnownModel, **settings: Any) -> dict[str, Any]:
    batch = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "bf16": True}
    checkpointed = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }
    return {
        "model": {
            "name": known_model.ids[0],
            "folder": None,
            "config": copy.deepcopy(dict(known_model.config)),
            "dtype": "bfloat16",
            "layers": layers_of(known_model.config),
            "attn_implementation": None,
        },
        "adapter": None,
        "settings": {**batch, **checkpointed, **settings},
        "lengths": {"prompt": 40, "completion": 40, "padded": False},
        "device": "cpu",
        "sharding": {"kind": "none", "ranks": 1},
        "micro_steps": None,
        "steps": 1,
    }


def test_there_are_enough() -> None:
    assert len(MODELS) >= 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "known_model",
    [
        pytest.param(
            known_model, id=name, marks=[] if name in FIRST_OF_TYPE.values() else [pytest.mark.long]
        )
        for known_model in MODELS
        for name in known_model.ids[:1]
    ],
)
def test_every_model_is_traced_with_the_parameters_of_its_shape(
    known_model: catalog.KnownModel,
) -> None:
    trace = stand_in.trace(specification(known_model))
    layers = layers_of(known_model.config)
    assert trace["layers"] == layers
    assert trace["inventory"]["parameters"] == shape(cut(known_model.config, layers)).parameters


@pytest.mark.parametrize("kind", ["granitemoehybrid", "llama4"])
def test_what_fails_in_trl_is_refused_with_what_helps(kind: str) -> None:
    pytest.importorskip("trl", minversion="1.16")
    from autotune.worker.trl import step_trace

    known_model = next(candidate for candidate in MODELS if candidate.config["model_type"] == kind)
    step_trace.warm({"model": {"config": {"model_type": kind}}})
    with pytest.raises(Untraceable, match=r"num_experts.*Set router_aux_loss_coef to 0\.0"):
        step_trace.trace(
            {
                **specification(known_model, num_generations=2, per_device_train_batch_size=2),
                "method": "grpo",
            }
        )


MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "_experts_implementation": "eager",
}


@pytest.mark.parametrize("routing", ["even", "one"])
def test_a_stand_in_step_sends_a_token_to_its_experts_alone(routing: str) -> None:
    """In the loop over experts each takes the tokens routed to it, as in traces of TRL's
    trainers.
    """
    known_model = next(
        candidate for candidate in MODELS if candidate.config["model_type"] == "qwen3_next"
    )
    spec = {**specification(known_model, gradient_checkpointing=False), "routing": routing}
    spec["model"] = {**spec["model"], "config": MIXTURE, "layers": None}
    trace = stand_in.trace(spec)
    forward = next(phase for phase in trace["work"] if phase["phase"] == "forward")
    tokens = 80
    layers = 2
    hidden = 64
    width = 128
    heads = 64
    groups = 32
    attention_and_router = 2 * hidden * heads + 2 * hidden * groups + hidden * 16
    experts = 2 * 3 * hidden * width  # a token's two of sixteen
    assert forward["in_layers"]["bfloat16"] == 2 * tokens * layers * (
        attention_and_router + experts
    )
    assert ("experts are assumed to be loaded evenly" in " ".join(trace["notes"])) == (
        routing == "even"
    )
