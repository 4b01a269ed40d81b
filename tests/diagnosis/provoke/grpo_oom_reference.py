"""GRPO whose reference model finds no room while it scores."""

from __future__ import annotations

from parts import fail_at, gpu_memory, grpo, inside, learning, out_of_memory

message = gpu_memory(
    "1.10 GiB",
    total="44.40 GiB",
    free="780.00 MiB",
    process="43.62 GiB",
    live="42.80 GiB",
    idle="310.00 MiB",
)
fail_at(
    "transformers.models.qwen2.modeling_qwen2:Qwen2MLP.forward",
    out_of_memory(message),
    when=lambda: not learning() and inside("_get_per_token_logps_and_entropies"),
)
grpo(beta=0.1)
