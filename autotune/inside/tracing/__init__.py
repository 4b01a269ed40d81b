"""Following a training step without a GPU, without weights and without memory: every storage of it, in order.

The installed framework's own code runs on fake tensors; a dispatch mode (`tracker`) sees every operation and writes down
what is allocated and given back. Framework-neutral; the adapters beside (`adapters/*_trace.py`) know whose step it is.

An adapter of this kind answers the keeper like any other (`warm`, `load`, `measure`, `release`): `load` takes nothing but
the imports' side effects, `measure` takes one specification and answers with one trace.

The specification, as JSON (`measure`'s request):

    {"method": "grpo" | "rloo" | "sft" | "dpo" | "online-dpo" | "generic",
     "model": {"name": s, "folder": s | null, "config": {...}, "dtype": "bfloat16", "attn_implementation": "sdpa" | null,
               "load_in_4bit": false, "load_in_8bit": false, "gptq_bits": null,   and how, under the libraries' names
               "layers": null | n},                                trace only so many layers
     "adapter": {"lora_r": .., ...} | null,                        as `load` has it in the TRL adapter
     "settings": {...},                                            the framework's own settings, as a probe gets them
     "device": "cuda" | "cpu",                                     whose kernels, autocast rules and defaults to follow
     "capability": [8, 0] | absent,                                of that GPU: attention kernels and workspaces go by it
     "lengths": {"prompt": P, "completion": C, "padded": false},   a batch is B x (P + C) tokens; a row of SFT or DPO is P + C
     "sharding": {"kind": "none" | "ddp" | "fsdp2" | "zero1" | "zero2" | "zero3", "ranks": w},
     "micro_steps": null | k,                                      micro-steps per optimizer step to follow; null: up to 2
     "steps": 2,
     "trust_remote_code": false}

The answer, as JSON, is what `autotune.trace.Trace` describes, field by field.

A model or a setting that cannot be followed raises `Untraceable`, whose text names the operation or the module.
"""

from __future__ import annotations


class Untraceable(RuntimeError):
    """The step cannot be followed; the text says which operation or module is in the way."""
