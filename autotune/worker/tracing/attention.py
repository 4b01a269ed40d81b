"""`scaled_dot_product_attention` as on a CUDA device: the kernel that torch selects there, and the tensors it saves.

torch's choice (`sdp_utils.cpp`) depends on device, precision, head size, mask and compute capability. On CPU tensors it
would take the CPU's kernel. So the public operation is replaced by one that applies CUDA's rules and then calls the
kernel's own operation. Its outputs and saved tensors are those of the device: output and log-sum-exp for flash and cuDNN,
also the expanded mask for the memory-efficient kernel, the full score matrices for the math kernel.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.functional import pad

from ..releases import release
from . import traced_gpu
from .patching import torch_kernels

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


def follow_cuda() -> AbstractContextManager[None]:
    """Replace `scaled_dot_product_attention` on CPU tensors by CUDA's behaviour."""
    return torch_kernels(lambda library: library.impl("scaled_dot_product_attention", _attention, "CompositeImplicitAutograd"))


def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *,
    scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Prepare operands as `aten/src/ATen/native/transformers/attention.cpp` does, then call the chosen kernel."""
    kernel = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-math.inf, dtype=query.dtype, device=mask.device))
    if kernel == "flash":
        size = query.shape[-1]
        scale = 1 / math.sqrt(size) if scale is None else scale
        if size % 8:
            query, key, value = (pad(tensor, (0, 8 - size % 8)) for tensor in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :size] if size % 8 else out
    logsumexp = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if kernel == "cudnn":
        given = (query, key, value, mask, logsumexp, dropout_p, is_causal, False)
        return aten._scaled_dot_product_cudnn_attention(*given, scale=scale)[0]
    if kernel == "efficient":
        if mask is not None:
            if any(stride % 8 for stride in mask.stride()[:-1]) or mask.stride(-1) != 1:  # rows begin at multiples of 8
                length = mask.shape[-1]
                mask = pad(mask, (0, 8 - length % 8))[..., :length]
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])  # over heads, without a copy
        operands = (query, key, value, mask, logsumexp, dropout_p, is_causal)
        return aten._scaled_dot_product_efficient_attention(*operands, scale=scale)[0]
    inputs = (query, key, value, mask, dropout_p, is_causal, None)
    return aten._scaled_dot_product_attention_math(*inputs, scale=scale, enable_gqa=enable_gqa)[0]


def choose(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, gqa: bool) -> str:
    """Return torch's choice on this GPU: `cudnn`, `flash`, `efficient` or `math`."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4 or 0 in (query.shape[-2], key.shape[-2]):
        return "math"
    # cuDNN's comes first on Hopper and data-centre Blackwell, torch >= 2.10 (cuDNN > 9.15.0). It saves the same as flash:
    # the output, one float32 per row and head, and a given mask as it is.
    preferred = release("torch") >= (2, 10) and traced_gpu.capability()[0] in (9, 10) and torch.backends.cuda.cudnn_sdp_enabled()
    if preferred and _fits_cudnn(query, key, value, mask, dropout, gqa):
        return "cudnn"
    if torch.backends.cuda.flash_sdp_enabled() and mask is None and _fits_flash(query, key, value, dropout, causal, gqa):
        return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled() and _fits_efficient(query, key, value, mask, gqa):
        return "efficient"
    return "math"


# Rules of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and `sdp_utils_cpp.h`.


def _fits_cudnn(query: Any, key: Any, value: Any, mask: Any, dropout: float, gqa: bool) -> bool:
    return bool(
        query.dtype in _HALF
        and max(query.shape[-1], value.shape[-1]) <= 128
        and query.shape[-1] % 8 == value.shape[-1] % 8 == 0
        and key.shape[2] != 1
        and (mask is None or not mask.requires_grad)
        and dropout * 16 == math.floor(dropout * 16)
        and _heads_agree(query, key, value, gqa, supported=True)
        and _rows_are_dense(query, key, value, mask)
    )


def _fits_flash(query: Any, key: Any, value: Any, dropout: float, causal: bool, gqa: bool) -> bool:
    size, (major, minor) = query.shape[-1], traced_gpu.capability()
    needs_gradient = any(tensor.requires_grad for tensor in (query, key, value))
    little_shared_memory = major == 12 or (major == 8 and minor in range(6, 10))
    backward_fits = not little_shared_memory or size <= 192 or (dropout == 0 and size > 224)
    return bool(
        major >= 8
        and query.dtype in _HALF
        and size == key.shape[-1] == value.shape[-1]
        and size <= 256
        and not (causal and query.shape[-2] != key.shape[-2])
        and (backward_fits or not needs_gradient)
        and _heads_agree(query, key, value, gqa, supported=True)
        and _rows_are_dense(query, key, value, None)
    )


def _fits_efficient(query: Any, key: Any, value: Any, mask: Any, gqa: bool) -> bool:
    major = traced_gpu.capability()[0]
    half = query.dtype in _HALF
    if query.dtype not in ((*_HALF, torch.float32) if major >= 8 else (torch.float16, torch.float32)):
        return False
    aligned = 8 if half and major >= 7 else 4 if major >= 8 else 1
    return bool(
        query.shape[-1] == key.shape[-1]
        and query.shape[-1] % aligned == value.shape[-1] % aligned == 0
        and _heads_agree(query, key, value, gqa, supported=False)
        and _rows_are_dense(query, key, value, mask)
    )


def _heads_agree(query: Any, key: Any, value: Any, gqa: bool, *, supported: bool) -> bool:
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    if gqa and supported:
        return bool(key.shape[1] == value.shape[1] and query.shape[1] % key.shape[1] == 0)
    return bool(query.shape[1] == key.shape[1] == value.shape[1])


def _rows_are_dense(*tensors: Any) -> bool:
    return all(tensor is None or tensor.stride(-1) == 1 for tensor in tensors)
