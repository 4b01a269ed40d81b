"""cuBLAS that finds no room for its handle."""

from __future__ import annotations

from parts import fail_at, sft

message = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
fail_at("transformers.models.qwen2.modeling_qwen2:Qwen2Attention.forward", RuntimeError(message))
sft(gradient_checkpointing=False)
