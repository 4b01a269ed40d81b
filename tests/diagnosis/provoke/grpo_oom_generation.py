"""GRPO whose cache of keys and values finds no room while completions grow."""

from __future__ import annotations

from parts import fail_at, gpu_memory, grpo, out_of_memory

message = gpu_memory(
    "1.75 GiB",
    total="47.41 GiB",
    free="1.10 GiB",
    process="46.29 GiB",
    live="44.87 GiB",
    idle="911.30 MiB",
)
fail_at("transformers.cache_utils:DynamicLayer.update", out_of_memory(message), call=9)
grpo()
