"""A matrix product that cuBLAS gives up."""

from __future__ import annotations

from parts import fail_at, plain_trainer

message = (
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n,"
    " k, &falpha, a)`"
)
fail_at("transformers.models.qwen2.modeling_qwen2:Qwen2MLP.forward", RuntimeError(message), call=3)
plain_trainer()
