"""Attention as on a CUDA device: the kernel that is selected there, and the tensors it saves.

`scaled_dot_product_attention`: torch's choice (`sdp_utils.cpp`) depends on device, precision, head
size, mask and compute capability. On CPU tensors it would take the CPU's kernel. So the public
operation is replaced by one that applies CUDA's rules and then calls the kernel's own operation.
Its outputs and saved tensors are those of the device: output and log-sum-exp for flash and cuDNN,
also the expanded mask for the memory-efficient kernel, the full score matrices for the math kernel.

The flash-attention package: transformers imports `flash_attn` by name and checks for the package
and a GPU. Both checks pass here, and its functions are torch's own operations for the same kernels,
with padded batches and packed rows (`cu_seqlens`).

FlashAttention 3 over packed rows: written for `FlashAttnVarlenFunc` in
`hopper/flash_attn_interface.py` of flash-attention, which `kernels-community/flash-attn3` builds.
Its two operations allocate their results on any device, so that real tensors hold the same as fake
ones.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad

from ..releases import release
from . import capability
from .patching import all_entered, attribute, swapped, torch_kernels

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)


# 1. `scaled_dot_product_attention`.


def dot_product_as_on_cuda() -> AbstractContextManager[None]:
    """Replace `scaled_dot_product_attention` on CPU tensors by CUDA's behaviour."""
    return torch_kernels(
        lambda library: library.impl(
            "scaled_dot_product_attention", _attention, "CompositeImplicitAutograd"
        )
    )


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Prepare operands as `aten/src/ATen/native/transformers/attention.cpp` does, then call the
    chosen kernel.
    """
    kernel = choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:
        mask = _added_to_scores(mask, query.dtype)

    if kernel == "flash":
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if kernel == "math":
        return aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    logsumexp = torch.is_grad_enabled() and _needs_gradient(query, key, value)
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(
            query, key, value, mask, logsumexp, dropout_p, is_causal, False, scale=scale
        )[0]
    if mask is not None:
        mask = _aligned(mask)
        # Over heads, without a copy.
        mask = mask.expand(*query.shape[:3], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, logsumexp, dropout_p, is_causal, scale=scale
    )[0]


def _added_to_scores(mask: Any, dtype: torch.dtype) -> Any:
    """Return 0 where the mask is set, else minus infinity."""
    hidden = torch.scalar_tensor(-math.inf, dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, hidden)


def _flash(
    query: Any,
    key: Any,
    value: Any,
    dropout: float,
    causal: bool,
    scale: float | None,
) -> Any:
    """Call the kernel with heads padded to a multiple of 8."""
    head_size = query.shape[-1]
    if scale is None:
        scale = 1 / math.sqrt(head_size)
    query, key, value = _padded_heads(query, key, value)
    out = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout, causal, False, scale=scale
    )[0]
    return out[..., :head_size] if head_size % 8 else out


def _padded_heads(
    query: Any,
    key: Any,
    value: Any,
) -> tuple[Any, Any, Any]:
    excess = query.shape[-1] % 8
    if not excess:
        return query, key, value
    padding = (0, 8 - excess)
    return pad(query, padding), pad(key, padding), pad(value, padding)


def _aligned(mask: Any) -> Any:
    """Let rows begin at multiples of 8."""
    *strides, last_stride = mask.stride()
    are_aligned = all(stride % 8 == 0 for stride in strides)
    if last_stride == 1 and are_aligned:
        return mask
    length = mask.shape[-1]
    return pad(mask, (0, 8 - length % 8))[..., :length]


def _needs_gradient(*tensors: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors)


def choose(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    causal: bool,
    gqa: bool,
) -> str:
    """Return torch's choice on this GPU: `cudnn`, `flash`, `efficient` or `math`."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return "math"
    if query.shape[-2] == 0 or key.shape[-2] == 0:
        return "math"
    # cuDNN's comes first on Hopper and data-centre Blackwell if it is later than 9.15.0. The rule
    # is in torch 2.10, such a cuDNN in PyPI's wheels from 2.11 on. It saves the same as flash: the
    # output, one float32 per row and head, and a given mask as it is.
    prefers_cudnn = (
        release("torch") >= (2, 11)
        and capability()[0] in (9, 10)
        and torch.backends.cuda.cudnn_sdp_enabled()
    )
    if prefers_cudnn and _fits_cudnn(query, key, value, mask, dropout, gqa):
        return "cudnn"
    is_enabled = torch.backends.cuda.flash_sdp_enabled()
    flash_enabled = is_enabled and mask is None
    if flash_enabled and _fits_flash(query, key, value, dropout, causal, gqa):
        return "flash"
    efficient_enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
    if efficient_enabled and _fits_efficient(query, key, value, mask, gqa):
        return "efficient"
    return "math"


# Rules of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp` and `sdp_utils_cpp.h`.


def _fits_cudnn(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    gqa: bool,
) -> bool:
    return bool(
        query.dtype in _HALF
        and max(query.shape[-1], value.shape[-1]) <= 128
        and query.shape[-1] % 8 == value.shape[-1] % 8 == 0
        and key.shape[2] != 1
        and (mask is None or not mask.requires_grad)
        and dropout * 16 == math.floor(dropout * 16)
        and _heads_agree(query, key, value, grouped=gqa)
        and _rows_are_dense(query, key, value, mask)
    )


def _fits_flash(
    query: Any,
    key: Any,
    value: Any,
    dropout: float,
    causal: bool,
    gqa: bool,
) -> bool:
    head_size = query.shape[-1]
    major, minor = capability()
    has_smaller_memory = major == 8 and minor in range(6, 10)
    little_shared_memory = major == 12 or has_smaller_memory
    backward_fits = True
    if little_shared_memory:
        backward_fits = head_size <= 192 or (dropout == 0 and head_size > 224)
    return bool(
        major >= 8
        and query.dtype in _HALF
        and head_size == key.shape[-1] == value.shape[-1]
        and head_size <= 256
        and not (causal and query.shape[-2] != key.shape[-2])
        and (backward_fits or not _needs_gradient(query, key, value))
        and _heads_agree(query, key, value, grouped=gqa)
        and _rows_are_dense(query, key, value, None)
    )


def _fits_efficient(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    gqa: bool,
) -> bool:
    major = capability()[0]
    dtypes = [torch.float16, torch.float32]
    if major >= 8:
        dtypes.append(torch.bfloat16)
    if query.dtype not in dtypes:
        return False
    alignment = 4 if major >= 8 else 1
    if query.dtype in _HALF and major >= 7:
        alignment = 8
    return bool(
        query.shape[-1] == key.shape[-1]
        and query.shape[-1] % alignment == value.shape[-1] % alignment == 0
        and _heads_agree(query, key, value, grouped=False)
        and _rows_are_dense(query, key, value, mask)
    )


def _heads_agree(
    query: Any,
    key: Any,
    value: Any,
    *,
    grouped: bool,
) -> bool:
    """Return True if batches and heads are equal, or with `grouped` if query heads share keys."""
    batch, heads = query.shape[:2]
    key_heads = key.shape[1]
    if not batch == key.shape[0] == value.shape[0] or key_heads != value.shape[1]:
        return False
    return bool(heads % key_heads == 0) if grouped else bool(heads == key_heads)


def _rows_are_dense(*tensors: Any) -> bool:
    return all(tensor is None or tensor.stride(-1) == 1 for tensor in tensors)


# 2. The flash-attention package.


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention over rows of equal length: batch, row, head, size."""
    return flash_attn_varlen_func(
        q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size
    )


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Attention over packed rows: token, head, size."""
    head_size = q.shape[-1]
    if softmax_scale is None:
        softmax_scale = 1 / math.sqrt(head_size)
    q, k, v = _padded_heads(q, k, v)
    out = aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        dropout_p,
        causal,
        False,
        scale=softmax_scale,
        window_size_left=window_size[0],
        window_size_right=window_size[1],
    )[0]
    return out[..., :head_size] if head_size % 8 else out


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError(
        "flash_attn_with_kvcache: not available in a trace. Training steps do not decode with a"
        " cache."
    )


def index_first_axis(values: Any, indices: Any) -> Any:
    return values[indices]


def pad_input(
    hidden_states: Any,
    indices: Any,
    batch: int,
    seqlen: int,
) -> Any:
    rows = torch.zeros(
        batch * seqlen,
        *hidden_states.shape[1:],
        device=hidden_states.device,
        dtype=hidden_states.dtype,
    )
    rows[indices] = hidden_states
    return rows.view(batch, seqlen, *hidden_states.shape[1:])


def unpad_input(
    hidden_states: Any,
    attention_mask: Any,
    unused_mask: Any = None,
) -> Any:
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    starts = pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = hidden_states.reshape(-1, *hidden_states.shape[2:])[indices]
    longest = int(lengths.max().item())
    used_lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    return rows, indices, starts, longest, used_lengths


_ATTENTION = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
_PADDING = (pad_input, unpad_input, index_first_axis)


@all_entered
def flash_package_installed() -> Iterator[AbstractContextManager[None]]:
    """Install the stub, and let transformers accept it."""
    yield _package_importable()
    yield _availability_checks_pass()
    yield _functions_of_transformers_replaced()
    yield _model_checks_pass()


@all_entered
def _package_importable() -> Iterator[AbstractContextManager[None]]:
    package = ModuleType("flash_attn")
    padding = ModuleType("flash_attn.bert_padding")
    vars(package).update(
        __version__="2.8.3",
        __path__=[],
        bert_padding=padding,
    )
    for module, functions in ((package, _ATTENTION), (padding, _PADDING)):
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=module is package)
        vars(module).update({function.__name__: function for function in functions})
        yield swapped(sys.modules, module.__name__, module)


@all_entered
def _availability_checks_pass() -> Iterator[AbstractContextManager[None]]:
    """Let the checks pass in every module that has them; releases differ."""
    for name, module in list(sys.modules.items()):
        package = name.split(".")[0]
        if package not in ("transformers", "trl", "peft"):
            continue
        for check in ("is_flash_attn_2_available", "is_flash_attn_available"):
            if callable(vars(module).get(check)):
                yield swapped(vars(module), check, _passes)


@all_entered
def _functions_of_transformers_replaced() -> Iterator[AbstractContextManager[None]]:
    utilities = sys.modules.get("transformers.modeling_flash_attention_utils")
    if utilities is None:
        return
    names = vars(utilities)
    compatibility = names.get("FLASH_ATTENTION_COMPATIBILITY_MATRIX", {})
    for checks in compatibility.values():
        if checks.get("flash_attn_version") == 2:
            yield swapped(checks, "general_availability_check", _passes)
    if "_loaded_implementation" in names:
        yield swapped(names, "_loaded_implementation", None)
    if "lazy_import_flash_attention" not in names:  # releases that import at load time
        for function in (flash_attn_func, flash_attn_varlen_func, *_PADDING):
            yield swapped(names, function.__name__, function)
        yield swapped(names, "_flash_supports_window_size", True)


@all_entered
def _model_checks_pass() -> Iterator[AbstractContextManager[None]]:
    """Let the model's own checks of package, device and precision pass."""
    modeling = sys.modules.get("transformers.modeling_utils")
    base = getattr(modeling, "PreTrainedModel", None)
    if base is None:
        return
    answers = {
        "_flash_attn_can_dispatch": _passes,
        "_flash_attn_2_can_dispatch": _passes,
        "_check_and_enable_flash_attn_2": classmethod(_enable),
    }
    for name, answer in answers.items():
        if name in vars(base):
            yield attribute(base, name, answer)


def _passes(*args: Any, **kwargs: Any) -> bool:
    return True


def _enable(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    config._attn_implementation = "flash_attention_2"
    return config


# 3. FlashAttention 3.


def _flash3_forward(
    query: Any,
    key: Any,
    value: Any,
    pairs: int,
) -> Any:
    """Return the output, and log-sum-exp as head, token."""
    tokens, heads = query.shape[:2]
    out = torch.empty_like(query)
    return out, query.new_empty((heads, tokens), dtype=torch.float32)


def _flash3_backward(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    pairs: int,
    sequences: int,
) -> Any:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


_FLASH3_SCHEMA = "(Tensor query, Tensor key, Tensor value, int pairs) -> (Tensor, Tensor)"
_FLASH3_BACKWARD_SCHEMA = (
    "(Tensor gradient, Tensor query, Tensor key, Tensor value, int pairs, int sequences)"
    " -> (Tensor, Tensor, Tensor)"
)
_LIBRARY = torch.library.Library("autotune", "FRAGMENT")
"""Keeps the operations registered."""


def _register(
    name: str,
    schema: str,
    kernel: Callable[..., Any],
) -> None:
    if hasattr(torch.ops.autotune, name):
        return  # by this module, imported under another name
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")


_register("flash3_varlen", _FLASH3_SCHEMA, _flash3_forward)
_register("flash3_varlen_backward", _FLASH3_BACKWARD_SCHEMA, _flash3_backward)


class _Flash3(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any,
        query: Any,
        key: Any,
        value: Any,
        starts_q: Any,
        starts_k: Any,
        pairs: int,
    ) -> Any:
        out, logsumexp = torch.ops.autotune.flash3_varlen(query, key, value, pairs)
        ctx.save_for_backward(query, key, value, out, logsumexp, starts_q, starts_k)
        ctx.pairs = pairs
        ctx.sequences = starts_q.numel() - 1
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        gradients = torch.ops.autotune.flash3_varlen_backward(
            gradient.contiguous(), query, key, value, ctx.pairs, ctx.sequences
        )
        return *gradients, None, None, None


def flash3_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **_: Any,
) -> Any:
    """Attention over packed rows: token, head, size."""
    pairs = pairs_of(
        cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), causal=causal, window=window_size[0]
    )
    return _Flash3.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, pairs)


def pairs_of(
    starts_q: Sequence[int],
    starts_k: Sequence[int],
    *,
    causal: bool,
    window: int,
) -> int:
    """Return the pairs of query and key that attend, over all sequences; the last query sees the
    last key.
    """
    total = 0
    sequences = zip(pairwise(starts_q), pairwise(starts_k), strict=True)
    for (begin_q, end_q), (begin_k, end_k) in sequences:
        queries = end_q - begin_q
        keys = end_k - begin_k
        if causal:
            total += _causal_pairs(queries, keys, window)
        else:
            total += queries * keys
    return total


def _causal_pairs(
    queries: int,
    keys: int,
    window: int,
) -> int:
    """Return the pairs of one sequence.

    Each query sees one key more than the one before, up to all keys of its window. Example: 3
    queries, 5 keys and a window of 3 before the query's own make 3 + 4 + 4 pairs.
    """
    limit = keys if window < 0 else min(keys, window + 1)
    first = keys - queries + 1  # keys that the first query sees
    growing = min(queries, max(0, limit - first + 1))
    pairs_of_growing = growing * first + growing * (growing - 1) // 2
    return pairs_of_growing + (queries - growing) * limit


FLASH3_BACKWARD = torch.ops.autotune.flash3_varlen_backward.default
FLASH3 = SimpleNamespace(flash_attn_varlen_func=flash3_varlen_func)
"""The kernel as `kernels.get_kernel` returns it."""
