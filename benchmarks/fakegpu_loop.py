"""One run of FakeGPU's table on a GPU: an optimizer step without a trainer, and torch's peak of it.

    python benchmarks/fakegpu_loop.py '{"model": {...}, "method": "lora", ...}'

The model is made on the device without content. Started on emulated cards by fakegpu.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

GIB = 1 << 30
RANK, ALPHA = 8, 16


def main() -> int:
    row = json.loads(sys.argv[1])
    model = _model(row)
    if row["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if row["method"] != "full":
            model.enable_input_require_grads()
    model.train()
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], foreach=False
    )
    ids = torch.ones(1, row["length"], dtype=torch.long, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(row["accumulation"]):
        outputs = model(
            input_ids=ids,
            labels=ids,
            use_cache=False,
        )
        (
            outputs.loss / row["accumulation"]
        ).backward()  # the outputs are held until the next ones are there
    optimizer.step()
    torch.cuda.synchronize()
    print(json.dumps({"peak_gib": round(torch.cuda.max_memory_allocated() / GIB, 4)}), flush=True)
    return 0


def _model(row: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**row["config"])
    if row["method"] == "qlora":
        return _adapted(_quantised(config, nested=row["nested"]))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return _adapted(model) if row["method"] == "lora" else model


def _quantised(config: Any, *, nested: bool) -> Any:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from autotune.worker.trl import base_model

    quantisation = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return base_model.build_quantised(
        lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
        quantisation,
        dtype=torch.bfloat16,
        place="cuda",
    )


def _adapted(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(
        r=RANK,
        lora_alpha=ALPHA,
        lora_dropout=0.0,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, options)


if __name__ == "__main__":
    raise SystemExit(main())
