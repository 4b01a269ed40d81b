"""Steps to trace and to count: small models that differ in one respect each, and random ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

SHAPE: Mapping[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "tie_word_embeddings": True,
}
WIDE = {**SHAPE, "hidden_size": 64, "intermediate_size": 4096, "num_hidden_layers": 4}
"""Shape with most of its memory inside the layers."""

LARGE_VOCABULARY = {**SHAPE, "num_hidden_layers": 2, "vocab_size": 40_000}
"""More than one tile of logits, and embeddings that weigh more than the layers."""

FEW_TOKENS = {**SHAPE, "hidden_size": 512, "intermediate_size": 2048}
"""Shape with most of its memory in parameters, gradients and optimizer."""

KINDS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": SHAPE,
    "qwen3": {**SHAPE, "model_type": "qwen3", "head_dim": 32},
    "llama": {**SHAPE, "model_type": "llama", "tie_word_embeddings": False},
    "mistral": {
        **SHAPE,
        "model_type": "mistral",
        "sliding_window": 48,
        "tie_word_embeddings": False,
    },
    "gemma2": {**SHAPE, "model_type": "gemma2", "head_dim": 32, "sliding_window": 48},
    "gemma3": {**SHAPE, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 48},
    "phi3": {
        **SHAPE,
        "model_type": "phi3",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "granite": {**SHAPE, "model_type": "granite"},
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MAMBA = {
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_chunk_size": 32,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 384,
}
WIDER_HEADS = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 48,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 1024,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
}
KINDS_OF_2026: Mapping[str, Mapping[str, Any]] = {
    "qwen3.5": {**SHAPE, "model_type": "qwen3_5_text", **DELTA},
    "granite 4": {**SHAPE, "model_type": "granitemoehybrid", **MAMBA},
    "gemma 4": {**SHAPE, "model_type": "gemma4_text", **WIDER_HEADS},
}
LORA = {"lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"]}
EVERYWHERE = {"lora_r": 8, "lora_target_modules": "all-linear"}
SCORING = {**EVERYWHERE, "lora_task_type": "SEQ_CLS"}
DORA = {**EVERYWHERE, "use_dora": True}
DROPOUT = {**LORA, "lora_dropout": 0.1}
SAVED = {**LORA, "lora_modules_to_save": ["lm_head"]}

PLAIN = {"gradient_checkpointing": False}
REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
}
NON_REENTRANT = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}


def spec(
    method: str = "grpo",
    *,
    config: Mapping[str, Any] = SHAPE,
    dtype: str = "float32",
    adapter: Mapping[str, Any] | None = None,
    prompt: int = 40,
    completion: int = 56,
    padded: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Return a specification of `worker/tracing`."""
    batch = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, **PLAIN}
    generating = {"num_generations": 2} if method in ("grpo", "rloo") else {}
    return {
        "method": method,
        "model": {
            "name": "tiny",
            "folder": None,
            "config": dict(config),
            "dtype": dtype,
            "attn_implementation": None,
        },
        "adapter": adapter,
        "settings": {**batch, **generating, **settings},
        "device": "cpu",
        "lengths": {"prompt": prompt, "completion": completion, "padded": padded},
        "sharding": {"kind": "none", "ranks": 1},
        "micro_steps": None,
        "steps": 2,
    }


FIXED: Mapping[str, dict[str, Any]] = {
    "grpo": spec(),
    "grpo, padded": spec(padded=True),
    "grpo, checkpointing, reentrant": spec(config=WIDE, **REENTRANT),
    "grpo, checkpointing, non-reentrant": spec(config=WIDE, **NON_REENTRANT),
    "grpo, wide layers": spec(config=WIDE),
    "grpo, autocast": spec(bf16=True),
    "grpo, bf16 weights": spec(dtype="bfloat16"),
    "grpo, bf16 weights, autocast, checkpointing": spec(
        config=WIDE,
        dtype="bfloat16",
        bf16=True,
        **NON_REENTRANT,
    ),
    "grpo, lora": spec(adapter=LORA),
    "grpo, lora everywhere, checkpointing": spec(config=WIDE, adapter=EVERYWHERE, **NON_REENTRANT),
    "grpo, lora everywhere, bf16, reentrant, padded": spec(
        config=WIDE,
        adapter=EVERYWHERE,
        dtype="bfloat16",
        bf16=True,
        padded=True,
        **REENTRANT,
    ),
    "grpo, lora with dropout": spec(adapter=DROPOUT),
    "grpo, dora": spec(adapter=DORA),
    "grpo, dora, checkpointing, autocast": spec(adapter=DORA, bf16=True, **NON_REENTRANT),
    "grpo, accumulation": spec(gradient_accumulation_steps=3),
    "grpo, accumulation, generating in the middle": spec(
        gradient_accumulation_steps=4, steps_per_generation=2
    ),
    "grpo, old log-probabilities": spec(steps_per_generation=2),
    "grpo, old log-probabilities of many chunks": spec(
        per_device_train_batch_size=2,
        steps_per_generation=6,
        config=WIDE,
    ),
    "grpo, two iterations": spec(num_iterations=2),
    "grpo, completions from vllm": spec(use_vllm=True),
    "grpo, reference model": spec(beta=0.04),
    "grpo, reference model that is synchronised": spec(
        beta=0.04,
        sync_ref_model=True,
        ref_model_sync_steps=1,
    ),
    "grpo, reference by the adapter's absence": spec(beta=0.04, adapter=LORA),
    "grpo, bnpo": spec(loss_type="bnpo", padded=True),
    "grpo, dr_grpo": spec(loss_type="dr_grpo"),
    "grpo, cispo": spec(loss_type="cispo", beta=0.1),
    "grpo, ratios by sequence": spec(importance_sampling_level="sequence"),
    "grpo, most uncertain tokens": spec(top_entropy_quantile=0.2),
    "grpo, head in float32": spec(dtype="bfloat16", cast_lm_head_to_fp32=True),
    "grpo, large vocabulary, tied": spec(config=LARGE_VOCABULARY),
    "grpo, large vocabulary, untied, checkpointing": spec(
        config={**LARGE_VOCABULARY, "tie_word_embeddings": False}, bf16=True, **NON_REENTRANT
    ),
    "grpo, few tokens": spec(
        config=FEW_TOKENS,
        prompt=4,
        completion=4,
        per_device_train_batch_size=2,
    ),
    "grpo, few tokens, adafactor": spec(
        config=FEW_TOKENS,
        prompt=4,
        completion=4,
        per_device_train_batch_size=2,
        optim="adafactor",
    ),
    "grpo, adafactor": spec(config=LARGE_VOCABULARY, optim="adafactor"),
    "grpo, sgd": spec(optim="sgd", max_grad_norm=0.0),
    "grpo, unfused adam": spec(optim="adamw_torch", config=LARGE_VOCABULARY),
    "grpo, eager attention": spec(
        attn_implementation="eager",
        completion=216,
        config={**SHAPE, "num_attention_heads": 8},
    ),
    "grpo, eager attention, padded, checkpointing": spec(
        attn_implementation="eager",
        completion=216,
        padded=True,
        **REENTRANT,
    ),
    "grpo, qwen3": spec(config=KINDS["qwen3"], padded=True),
    "grpo, llama": spec(config=KINDS["llama"]),
    "grpo, mistral, window": spec(config=KINDS["mistral"]),
    "grpo, gemma2, window, padded": spec(config=KINDS["gemma2"], padded=True),
    "grpo, gemma3": spec(config=KINDS["gemma3"], dtype="bfloat16"),
    "grpo, phi3, lora": spec(config=KINDS["phi3"], adapter=EVERYWHERE),
    "grpo, granite": spec(config=KINDS["granite"]),
    "grpo, qwen3.5, padded": spec(config=KINDS_OF_2026["qwen3.5"], padded=True),
    "grpo, qwen3.5, checkpointing, bf16": spec(
        config=KINDS_OF_2026["qwen3.5"],
        dtype="bfloat16",
        bf16=True,
        **NON_REENTRANT,
    ),
    "grpo, granite 4": spec(config=KINDS_OF_2026["granite 4"], router_aux_loss_coef=0.0),
    "sft, granite 4, lora everywhere, checkpointing": spec(
        "sft",
        config=KINDS_OF_2026["granite 4"],
        adapter=EVERYWHERE,
        router_aux_loss_coef=0.0,
        **NON_REENTRANT,
    ),
    "grpo, gemma 4, padded": spec(config=KINDS_OF_2026["gemma 4"], padded=True),
    "grpo, gemma 4, bf16, checkpointing": spec(
        config=KINDS_OF_2026["gemma 4"],
        dtype="bfloat16",
        bf16=True,
        **REENTRANT,
    ),
    "rloo": spec("rloo"),
    "rloo, no reference": spec("rloo", beta=0.0, config=WIDE, **NON_REENTRANT),
    "rloo, lora, autocast": spec("rloo", adapter=LORA, bf16=True),
    "sft": spec("sft"),
    "sft, padded, wide": spec("sft", config=WIDE, padded=True),
    "sft, accumulation, checkpointing": spec(
        "sft", config=WIDE, gradient_accumulation_steps=2, **REENTRANT
    ),
    "sft, lora with a whole head": spec("sft", adapter=SAVED, bf16=True),
    "sft, dora, llama": spec("sft", config=KINDS["llama"], adapter=DORA),
    "sft, dft": spec("sft", loss_type="dft"),
    "sft, no padding, eager": spec("sft", padding_free=True, attn_implementation="eager"),
    "dpo": spec("dpo"),
    "dpo, padded, checkpointing": spec("dpo", config=WIDE, padded=True, **NON_REENTRANT),
    "dpo, lora, autocast": spec("dpo", adapter=LORA, bf16=True),
    "dpo, ipo, bf16 weights": spec(
        "dpo",
        loss_type="ipo",
        dtype="bfloat16",
        per_device_train_batch_size=2,
    ),
    "kto": spec("kto"),
    "kto, padded, lora, autocast": spec(
        "kto",
        adapter=LORA,
        bf16=True,
        padded=True,
    ),
    "kto, one pass, wide, checkpointing": spec(
        "kto", loss_type="apo_zero_unpaired", config=WIDE, **NON_REENTRANT
    ),
    "reward": spec("reward"),
    "reward, padded, wide, checkpointing": spec("reward", config=WIDE, padded=True, **REENTRANT),
    "reward, lora everywhere, autocast, accumulation": spec(
        "reward",
        adapter=SCORING,
        bf16=True,
        gradient_accumulation_steps=2,
    ),
    "async grpo": spec("async-grpo", token_budget=0),
    "async grpo, lora, autocast, checkpointing": spec(
        "async-grpo",
        token_budget=0,
        config=WIDE,
        adapter=LORA,
        bf16=True,
        **NON_REENTRANT,
    ),
    "async grpo, two groups, large vocabulary, accumulation": {
        **spec(
            "async-grpo",
            token_budget=0,
            config=LARGE_VOCABULARY,
            bf16=True,
            gradient_accumulation_steps=3,
        ),
        "groups": 2,
    },
    "async grpo, sliding windows": spec(
        "async-grpo",
        token_budget=0,
        config=KINDS["gemma3"],
        per_device_train_batch_size=2,
    ),
    "online dpo": spec("online-dpo"),
    "online dpo, lora, autocast, padded": spec(
        "online-dpo",
        adapter=LORA,
        bf16=True,
        padded=True,
    ),
    "online dpo, accumulation, checkpointing": spec(
        "online-dpo", config=WIDE, gradient_accumulation_steps=2, **NON_REENTRANT
    ),
    "dpo, references computed beforehand": spec(
        "dpo", precompute_ref_log_probs=True, gradient_accumulation_steps=2
    ),
}

LOSSES = {
    "grpo": ["grpo", "bnpo", "dr_grpo", "dapo", "cispo"],
    "rloo": [None],
    "sft": ["nll", "dft"],
    "dpo": ["sigmoid", "hinge", "ipo"],
}


def drawn(draw: random.Random) -> dict[str, Any]:
    """Return a random legal combination of the variations in the fixed cases."""
    method = draw.choice(["grpo", "grpo", "rloo", "sft", "dpo"])
    config = dict(draw.choice([*KINDS.values(), WIDE, LARGE_VOCABULARY]))
    if config["model_type"] != "phi3":
        config["tie_word_embeddings"] = draw.random() < 0.5
    config["num_hidden_layers"] = draw.randint(1, 4)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": draw.choice([4, 6]),
        "gradient_accumulation_steps": draw.choice([1, 1, 2, 3]),
        "optim": draw.choice(["adamw_torch", "adamw_torch_fused", "adafactor", "sgd"]),
        "max_grad_norm": draw.choice([0.0, 1.0]),
        "bf16": draw.random() < 0.5,
        "attn_implementation": draw.choice(["sdpa", "sdpa", "eager"]),
        **draw.choice([PLAIN, REENTRANT, NON_REENTRANT]),
    }
    loss = draw.choice(LOSSES[method])
    if loss is not None:
        settings["loss_type"] = loss
    if method in ("grpo", "rloo"):
        settings |= {
            "beta": draw.choice([0.0, 0.05]),
            "steps_per_generation": draw.choice([1, 2, 4]),
        }
        settings["num_iterations"] = draw.choice([1, 1, 2])
    return spec(
        method,
        config=config,
        dtype=draw.choice(["float32", "bfloat16"]),
        adapter=draw.choice([None, EVERYWHERE, DORA, DROPOUT])
        if config["model_type"] != "phi3"
        else draw.choice([None, EVERYWHERE]),
        prompt=draw.randint(24, 80),
        completion=draw.randint(48, 120),
        padded=draw.random() < 0.5,
        **settings,
    )
