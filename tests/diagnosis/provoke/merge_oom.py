"""An adapter that finds no room to be merged before the engine gets the weights."""

from __future__ import annotations

from parts import causal_model, fail_at, gpu_memory, out_of_memory
from peft import LoraConfig, get_peft_model

message = gpu_memory(
    "260.00 MiB",
    total="39.39 GiB",
    free="120.00 MiB",
    process="39.26 GiB",
    live="38.70 GiB",
    idle="90.00 MiB",
)
fail_at("peft.tuners.lora.layer:Linear.merge", out_of_memory(message))
get_peft_model(causal_model(), LoraConfig(target_modules=["q_proj"])).merge_adapter()
