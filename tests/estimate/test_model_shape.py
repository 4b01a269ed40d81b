"""Shapes of models against published figures and the models that transformers builds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest

from autotune import catalog
from autotune.core.errors import BadInput
from autotune.estimate.model_shape import architectures, dtype_bytes, shape
from tests.estimate.synthetic import config_of


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen2.5-7B", 7.616),
        ("meta-llama/Llama-3.1-8B", 8.030),
        ("mistralai/Mistral-7B-v0.1", 7.242),
        ("mistralai/Mixtral-8x7B-v0.1", 46.70),
        ("google/gemma-2-9b", 9.242),
        ("microsoft/phi-4", 14.66),
        ("Qwen/Qwen3-30B-A3B", 30.53),
    ],
)
def test_parameters_equal_the_published_count(name: str, billions: float) -> None:
    assert shape(config_of(name)).parameters / 1e9 == pytest.approx(billions, rel=5e-4)


def test_a_token_uses_few_experts() -> None:
    model_shape = shape(config_of("Qwen/Qwen3-30B-A3B"))
    assert (model_shape.active_parameters + model_shape.embedding) / 1e9 == pytest.approx(
        3.35, rel=0.02
    )  # published: 3.3B active
    assert model_shape.active_parameters < model_shape.parameters / 8


def test_cache_per_token_equals_the_formula() -> None:
    assert [layer.cached for layer in shape(config_of("Qwen/Qwen2.5-7B")).layers] == 28 * [
        2 * 4 * 128
    ]
    latent = shape(config_of("deepseek-ai/DeepSeek-V2-Lite"))
    assert {layer.cached for layer in latent.layers} == {512 + 64}


def test_windows_by_family() -> None:
    def windows(name: str) -> list[int | None]:
        return [layer.window for layer in shape(config_of(name)).layers]

    assert windows("google/gemma-2-9b")[:4] == [4096, None, 4096, None]
    assert windows("google/gemma-3-1b-it")[:7] == [512] * 5 + [None, 512]
    assert set(windows("Qwen/Qwen2.5-7B")) == {None}
    assert set(windows("mistralai/Mistral-7B-v0.1")) == {4096}


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(BadInput, match="mamba2"):
        shape({"model_type": "mamba2"})
    with pytest.raises(BadInput, match="hidden_size"):
        shape({"model_type": "llama"})
    with pytest.raises(BadInput, match="int3"):
        dtype_bytes("int3")


ODD: Mapping[str, Mapping[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 24},
    "qwen2": {},
    "qwen3": {"attention_bias": True},
    "gemma": {"head_dim": 24},
    "gemma2": {"head_dim": 24},
    "gemma3_text": {"head_dim": 24},
    "phi3": {"pad_token_id": 0},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "smollm3": {"attention_bias": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    "mixtral": {"num_local_experts": 3},
    "qwen2_moe": {
        "num_experts": 5,
        "moe_intermediate_size": 56,
        "shared_expert_intermediate_size": 88,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {"num_experts": 5, "moe_intermediate_size": 56, "decoder_sparse_step": 2},
    "granitemoe": {"num_local_experts": 3},
    "olmo2": {"pad_token_id": 0},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 24},
    "gpt_bigcode": {"n_embd": 96, "n_head": 4, "n_layer": 3, "n_inner": 200, "n_positions": 128},
    "gpt2": {"n_embd": 96, "n_head": 4, "n_layer": 3, "n_inner": None, "n_positions": 128},
    "deepseek_v2": {
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
    },
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "attention_bias": True,
    },
    "olmo3": {"attention_bias": True, "sliding_window": 64, "pad_token_id": 0},
    "glm": {"attention_bias": True, "head_dim": 24, "pad_token_id": 0},
    "glm4_moe_lite": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "q_lora_rank": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "pad_token_id": 0,
    },
    "qwen3_vl_text": {"attention_bias": True, "head_dim": 24},
    "qwen3_vl_moe_text": {
        "num_experts": 5,
        "moe_intermediate_size": 56,
        "decoder_sparse_step": 2,
        "head_dim": 24,
    },
    "qwen2_5_vl_text": {},
    "qwen2_vl_text": {},
    "qwen3_next": {
        **(
            DELTA := {
                "head_dim": 24,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 20,
                "linear_conv_kernel_dim": 3,
            }
        ),
        **(
            EXPERTS := {
                "num_experts": 5,
                "moe_intermediate_size": 56,
                "shared_expert_intermediate_size": 88,
            }
        ),
        "full_attention_interval": 2,
    },
    "qwen3_5_text": {
        **DELTA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "qwen3_5_moe_text": {
        **DELTA,
        **EXPERTS,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 3,
        "shared_intermediate_size": 72,
        "mamba_n_heads": 8,
        "mamba_d_head": 24,
        "mamba_d_state": 12,
        "mamba_n_groups": 2,
        "mamba_d_conv": 3,
        "mamba_proj_bias": True,
        "pad_token_id": 0,
    },
    "gemma4_text": {
        "head_dim": 24,
        "global_head_dim": 40,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 301,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 56,
    },
    "gemma4_unified_text": {
        "head_dim": 24,
        "global_head_dim": 40,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 56,
        "use_qk_norm": True,
        "attention_bias": True,
        "head_dim": 24,
        "pad_token_id": 0,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm_moe_dsa": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "pad_token_id": 0,
        "index_head_dim": 20,
        "index_n_heads": 3,
        "indexer_types": ["full", "shared", "full"],
    },
    "deepseek_v32": {
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "index_head_dim": 20,
        "index_n_heads": 3,
    },
    "llama4_text": {
        "num_local_experts": 3,
        "intermediate_size_mlp": 88,
        "interleave_moe_layer_step": 2,
        "head_dim": 24,
        "pad_token_id": 0,
    },
}
"""Unusual settings that make each architecture's own parameters appear."""

LATENT: Mapping[str, object] = {
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 24,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 56,
}


def test_every_architecture_is_tested() -> None:
    assert ODD.keys() == architectures().traits.keys()


def odd_config(kind: str, *, tied: bool) -> dict[str, object]:
    """Return the small configuration of an architecture, with its unusual settings."""
    return {
        "model_type": kind,
        "vocab_size": 301,
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        **({"num_experts_per_tok": 2} if architectures().traits[kind].experts else {}),
        **(LATENT if architectures().traits[kind].latent else {}),
        **ODD[kind],
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(ODD))
@pytest.mark.parametrize("tied", [False, True])
def test_unusual_models_have_the_parameters_of_transformers_models(kind: str, tied: bool) -> None:
    config = odd_config(kind, tied=tied)
    assert shape(config).parameters == built(config)


@pytest.mark.slow
@pytest.mark.parametrize("model", catalog.models(), ids=lambda model: model.ids[0])
def test_catalogued_models_have_the_parameters_of_transformers_models(
    model: catalog.KnownModel,
) -> None:
    assert shape(model.config).parameters == built(model.config)


def built(config: Mapping[str, object]) -> int:
    """Parameters of the installed transformers' model, built without memory: a multimodal model
    with its towers.
    """
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields: dict[str, Any] = {
        name: copy.deepcopy(value) for name, value in config.items() if name != "model_type"
    }
    kind = str(config["model_type"])
    model_config = CONFIG_MAPPING[kind.removesuffix("_text") if kind in WITHIN else kind](
        **(
            {"text_config": {**fields, "model_type": kind}, **tied(config)}
            if kind in WITHIN
            else fields
        )
    )
    architectures = config.get("architectures")
    with torch.device("meta"):
        if isinstance(architectures, list):
            model = getattr(transformers, architectures[0])(model_config)
        elif kind in WITHIN:
            model = transformers.AutoModelForImageTextToText.from_config(model_config)
            towers = [
                parameter.numel()
                for name, parameter in model.named_parameters()
                if ".visual." in name
            ]
            return sum(parameter.numel() for parameter in model.parameters()) - sum(towers)
        else:
            model = transformers.AutoModelForCausalLM.from_config(model_config)
    return sum(parameter.numel() for parameter in model.parameters())


def tied(config: Mapping[str, object]) -> dict[str, Any]:
    return {"tie_word_embeddings": config["tie_word_embeddings"]}


WITHIN = ("qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_vl_text", "qwen2_5_vl_text")
"""Language models that transformers builds only within a multimodal one."""
