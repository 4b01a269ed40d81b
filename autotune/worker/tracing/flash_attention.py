"""Stub of the flash-attention package: the same functions, outputs and saved tensors, without a
GPU.

transformers imports `flash_attn` by name and checks for the package and a GPU. Both checks pass
here, and its two functions are torch's own operations for the same kernels, with padded batches and
packed rows (`cu_seqlens`).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from .patching import attribute, swapped

aten = torch.ops.aten
VERSION = "2.8.3"


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
    return _attend(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size)


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
    given = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return _attend(q, k, v, *given, dropout_p, softmax_scale, causal, window_size)


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("flash_attn_with_kvcache: not available in a trace. Training steps do not decode with a cache.")


def _attend(
    q: Any,
    k: Any,
    v: Any,
    starts_q: Any,
    starts_k: Any,
    most_q: int,
    most_k: int,
    dropout: float,
    scale: Any,
    causal: bool,
    window: Any,
) -> Any:
    size = q.shape[-1]
    if size % 8:
        q, k, v = (torch.nn.functional.pad(tensor, (0, 8 - size % 8)) for tensor in (q, k, v))
    out = aten._flash_attention_forward(
        q, k, v, starts_q, starts_k, most_q, most_k, dropout, causal, False,
        scale=1 / math.sqrt(size) if scale is None else scale, window_size_left=window[0], window_size_right=window[1],
    )[0]  # fmt: skip
    return out[..., :size] if size % 8 else out


def index_first_axis(values: Any, indices: Any) -> Any:
    return values[indices]


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    rows = torch.zeros(batch * seqlen, *hidden_states.shape[1:], device=hidden_states.device, dtype=hidden_states.dtype)
    rows[indices] = hidden_states
    return rows.view(batch, seqlen, *hidden_states.shape[1:])


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> Any:
    mask = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    starts = torch.nn.functional.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = hidden_states.reshape(-1, *hidden_states.shape[2:])[indices]
    return rows, indices, starts, int(lengths.max().item()), attention_mask.sum(dim=-1, dtype=torch.int32)


@contextmanager
def installed() -> Iterator[None]:
    """Install the stub, and let transformers accept it."""
    with contextlib.ExitStack() as stack:
        for module in _modules():
            stack.enter_context(swapped(sys.modules, module.__name__, module))
        _patch_transformers(stack)
        yield


def _modules() -> list[ModuleType]:
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.__version__ = VERSION  # type: ignore[attr-defined]
    package.__path__ = []
    for module in (package, padding):
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=module is package)
    for function in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache):
        setattr(package, function.__name__, function)
    for function in (pad_input, unpad_input, index_first_axis):
        setattr(padding, function.__name__, function)
    package.bert_padding = padding  # type: ignore[attr-defined]
    return [package, padding]


def _patch_transformers(stack: contextlib.ExitStack) -> None:
    """Patch transformers' checks in every module that has them; releases differ."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("transformers", "trl", "peft")]:
        names = vars(sys.modules[name])
        for job in ("is_flash_attn_2_available", "is_flash_attn_available"):
            if callable(names.get(job)):
                stack.enter_context(swapped(names, job, lambda *args, **kwargs: True))
    utilities = sys.modules.get("transformers.modeling_flash_attention_utils")
    if utilities is not None:
        names = vars(utilities)
        for checks in names.get("FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).values():
            if checks.get("flash_attn_version") == 2:
                stack.enter_context(swapped(checks, "general_availability_check", lambda *args, **kwargs: True))
        if "_loaded_implementation" in names:
            stack.enter_context(swapped(names, "_loaded_implementation", None))
        if "lazy_import_flash_attention" not in names:  # releases that import at load time
            for function in (flash_attn_func, flash_attn_varlen_func, pad_input, unpad_input, index_first_axis):
                stack.enter_context(swapped(names, function.__name__, function))
            stack.enter_context(swapped(names, "_flash_supports_window_size", True))
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if base is not None:
        _patch_model_checks(stack, base)


def _patch_model_checks(stack: contextlib.ExitStack, base: Any) -> None:
    """Patch the model's own checks of package, device and precision."""

    def enable(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        config._attn_implementation = "flash_attention_2"
        return config

    answers = {
        "_flash_attn_can_dispatch": lambda self, *args, **kwargs: True,
        "_flash_attn_2_can_dispatch": lambda self, *args, **kwargs: True,
        "_check_and_enable_flash_attn_2": classmethod(enable),
    }
    for name, answer in answers.items():
        if name in vars(base):
            stack.enter_context(attribute(base, name, answer))
