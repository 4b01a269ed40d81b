"""An index beyond a table, on a GPU."""

from __future__ import annotations

from parts import fail_at, grpo, learning

message = (
    "CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__"
    "CUDART__TYPES.html for more information.\nCUDA kernel errors might be asynchronously "
    "reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing "
    "CUDA_LAUNCH_BLOCKING=1\nCompile with `TORCH_USE_CUDA_DSA` "
    "to enable device-side assertions.\n"
)
import torch  # noqa: E402

fail_at("torch.nn.functional:embedding", torch.AcceleratorError(message), when=learning)
grpo()
