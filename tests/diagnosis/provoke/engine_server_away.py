"""vLLM's server, where no server is."""

from __future__ import annotations

from parts import grpo

grpo(
    use_vllm=True,
    vllm_mode="server",
    vllm_server_timeout=3,
)
