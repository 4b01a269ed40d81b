"""Conversion of a chosen row into the specification of a trace, a sharding, and facts about its
device. No row has a special case here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autotune.catalog.model_lookup import find_model

MISTRAL: Mapping[str, object] = {
    "model_type": "mistral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "architectures": ["MistralForCausalLM"],
}
"""https://huggingface.co/mistralai/Mistral-7B-v0.1/blob/main/config.json"""

SANTACODER: Mapping[str, object] = {
    "model_type": "gpt_bigcode",
    "vocab_size": 49280,
    "n_embd": 2048,
    "n_layer": 24,
    "n_head": 16,
    "n_positions": 2048,
    "n_inner": 8192,
    "multi_query": True,
    "activation_function": "gelu_pytorch_tanh",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "attention_softmax_in_fp32": True,
    "scale_attention_softmax_in_fp32": True,
    "architectures": ["GPTBigCodeForCausalLM"],
}
"""https://huggingface.co/bigcode/gpt_bigcode-santacoder/blob/main/config.json"""

POWERLM: Mapping[str, object] = {
    "model_type": "granite",
    "vocab_size": 49152,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 40,
    "num_attention_heads": 36,
    "num_key_value_heads": 36,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "architectures": ["GraniteForCausalLM"],
}
"""Table 1 of https://arxiv.org/abs/2408.13359; 6 bytes per parameter are the 21.06 GB that full
fine-tuning kept.
"""

MIXTRAL = find_model("mistralai/Mixtral-8x7B-Instruct-v0.1").config
LLAMA_70B = find_model("meta-llama/Llama-2-70b-hf").config

MODELS = {
    "mistralai/Mistral-7B-v0.1": MISTRAL,
    "TheBloke/Mistral-7B-v0.1-GPTQ": MISTRAL,
    "bigcode/gpt_bigcode-santacoder": SANTACODER,
    "ibm/PowerLM-3b": POWERLM,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": MIXTRAL,
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": MIXTRAL,
    "NousResearch/Llama-2-70b-hf": LLAMA_70B,
    "TheBloke/Llama-2-70B-GPTQ": LLAMA_70B,
}
ADDED_TOKENS = {"mistral": 1, "mixtral": 1, "llama": 1}
"""sft_trainer adds a padding token where the tokenizer has none and resizes the embeddings to
the tokenizer's length.
"""

ADAPTER = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
GROUP_SIZE = 128
GROUP_SIZES = {
    "TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": -1,
    "TheBloke/Llama-2-70B-GPTQ": -1,
}
"""Group size of the main branch of TheBloke's GPTQ checkpoints; -1 is one group per column.
Those without groups follow from what the rows keep between steps, 23.97 and 36.12 GB: groups of
128 would add 0.9 and 1.3 GB of scales.
"""

KERNELS = {"fast_loss": True, "fast_rms_layernorm": True, "fast_rope_embeddings": True}
FSDP = {
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_sync_module_states": True,
    "fsdp_use_orig_params": True,  # accelerate launch's default
    "records_streams": True,  # torch 2.4
}
"""scripts/benchmarks/accelerate.yaml at the rows' commit."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Row, expressed."""

    row: Mapping[str, Any]
    specification: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Key of the trace: rows that a trace can't distinguish share one. The environment's
        versions are part of it.
        """
        text = json.dumps([self.row["environment"], self.specification], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def sharding(self) -> Mapping[str, Any] | None:
        ranks, configuration = int(self.row["gpus"]), self.row["framework_config"]
        if ranks == 1:
            return None
        options: dict[str, Any] = dict(FSDP)
        if (self.row["bf16"] or self.row["fp16"]) and self.row["tuning"] == "full":
            options["master_bytes"] = 4  # accelerate widens what trains under mixed precision
        if self.specification["settings"].get("fms", {}).get("quantised"):
            options["begins_on_meta"] = (
                True  # transformers' _load_state_dict_into_meta_model, and the GPTQ loader's own
            )
        if "foak" in configuration and "peft" in configuration:
            options["ignores_trainable"] = True  # lora_adapters_switch_ddp_from_fsdp
        return {"kind": "fsdp1", "ranks": ranks, "options": options}

    @property
    def contexts(self) -> int:
        """Processes with a CUDA context on each GPU.

        The GPTQ loader asks accelerate for balanced memory, which allocates on every visible GPU to
        see how much there is (`get_max_memory` in accelerate/utils/modeling.py): under several
        processes each is then in all of them.
        """
        return int(self.row["gpus"]) if "gptq" in self.row["framework_config"] else 1

    @property
    def label(self) -> str:
        """The class that it is summed up in."""
        hardware = "one GPU" if self.row["gpus"] == 1 else "FSDP"
        fused = "fused kernels" if "foak" in self.row["framework_config"] else "plain"
        return f"{self.row['tuning']}, {hardware}, {fused}"


def fms(row: Mapping[str, Any]) -> Case:
    """fms-hf-tuning's sft_trainer with fms-acceleration: a packed batch through TRL's
    SFTTrainer, whose step is the Trainer's.
    """
    config = dict(MODELS[row["model"]])
    kind = str(config["model_type"])
    config["vocab_size"] = int(str(config["vocab_size"])) + ADDED_TOKENS.get(kind, 0)
    configuration = row["framework_config"]
    quantised = (
        "bitsandbytes"
        if "bnb" in configuration
        else "auto_gptq"
        if "gptq" in configuration
        else None
    )
    adapter = (
        {**ADAPTER, "target_modules": list(row["target_modules"])}
        if row["target_modules"]
        else None
    )
    fused = (
        {**KERNELS, "fast_loss": "fused_ce_liger" if "liger" in configuration else True}
        if "foak" in configuration
        else None
    )
    specification: dict[str, Any] = {
        "method": "generic",
        "model": {
            "name": row["model"],
            "folder": None,
            "config": config,
            "dtype": row["dtype"],
            "attn_implementation": "flash_attention_2",
            **_quantisation(row, quantised),
        },
        "adapter": None if quantised else _as_autotune(adapter),
        "settings": {
            "per_device_train_batch_size": row["micro_batch"],
            "gradient_accumulation_steps": 1,
            "bf16": row["bf16"],
            "fp16": row["fp16"],
            # PEFT's preparation of quantised models turns checkpointing on, and the trainer leaves
            # it.
            "gradient_checkpointing": quantised is None,
            "gradient_checkpointing_kwargs": None if quantised else {"use_reentrant": True},
            "max_grad_norm": 1.0,
            "optim": "adamw_torch",
        },
        "device": "cuda",
        "capability": [8, 0],
        "lengths": {"prompt": 0, "completion": row["length"], "padded": False},
        "steps": 2,
    }
    if row["gpus"] > 1:
        specification["sharding"] = {
            "kind": "fsdp1",
            "ranks": 2,
        }  # the trace is a plain one; it says when what is used
    specification["settings"]["patches"] = [
        "foresight_torch:full_slices"
    ]  # both environments had torch 2.4
    if quantised or fused:
        specification["settings"]["patches"].append("foresight_fms:augment")
        specification["settings"]["fms"] = {
            "quantised": quantised,
            "kernels": fused,
            "adapter": adapter,
            "group_size": GROUP_SIZES.get(row["model"], GROUP_SIZE),
            "bf16": row["bf16"],
            # TRL leaves a model alone that is quantised and sharded.
            "prepared_by_trainer": configuration == "baseline-peft-bnb" and row["gpus"] == 1,
            "sharded": row["gpus"] > 1,
        }
    return Case(row=row, specification=specification)


def _quantisation(row: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Return the quantisation of BNBAccelerationPlugin; the plugin inserts its GPTQ layers."""
    if kind != "bitsandbytes":
        return {}
    stored = row["dtype"] if row["gpus"] > 1 else "uint8"
    return {
        "load_in_4bit": True,
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": row["dtype"],
        "bnb_4bit_quant_storage": stored,
    }


def _as_autotune(adapter: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the adapter under the names of a specification."""
    if adapter is None:
        return None
    names = {"r": "lora_r", "target_modules": "lora_target_modules", "task_type": "lora_task_type"}
    return {names.get(name, name): value for name, value in adapter.items()}
