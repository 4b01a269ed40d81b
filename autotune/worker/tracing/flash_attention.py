"""Stub of the flash-attention package: the same functions, outputs and saved tensors, without a GPU.

transformers imports `flash_attn` by name and checks for the package and a GPU. Both checks pass here, and its two functions
are torch's own operations for the same kernels, with padded batches and packed rows (`cu_seqlens`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import pad

from .patching import all_entered, attribute, swapped

aten = torch.ops.aten


def flash_attn_func(
    q: Any, k: Any, v: Any, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:  # fmt: skip
    """Attention over rows of equal length: batch, row, head, size."""
    return flash_attn_varlen_func(q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, softmax_scale, causal, window_size)


def flash_attn_varlen_func(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: Any, max_seqlen_k: Any, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Any = None, deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> Any:  # fmt: skip
    """Attention over packed rows: token, head, size."""
    size = q.shape[-1]
    if size % 8:
        q, k, v = (pad(tensor, (0, 8 - size % 8)) for tensor in (q, k, v))
    out = aten._flash_attention_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k), dropout_p, causal, False,
        scale=1 / math.sqrt(size) if softmax_scale is None else softmax_scale,
        window_size_left=window_size[0], window_size_right=window_size[1],
    )[0]  # fmt: skip
    return out[..., :size] if size % 8 else out


def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("flash_attn_with_kvcache: not available in a trace. Training steps do not decode with a cache.")


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
    starts = pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    rows = hidden_states.reshape(-1, *hidden_states.shape[2:])[indices]
    return rows, indices, starts, int(lengths.max().item()), attention_mask.sum(dim=-1, dtype=torch.int32)


ATTENTION = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
PADDING = (pad_input, unpad_input, index_first_axis)


@all_entered
def installed() -> Iterator[AbstractContextManager[None]]:
    """Install the stub, and let transformers accept it."""
    # 1. The package.
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    vars(package).update(__version__="2.8.3", __path__=[], bert_padding=padding)
    for module, functions in ((package, ATTENTION), (padding, PADDING)):
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=module is package)
        vars(module).update({function.__name__: function for function in functions})
        yield swapped(sys.modules, module.__name__, module)
    # 2. Checks in every module that has them; releases differ.
    for names in [vars(found) for name, found in sys.modules.items() if name.split(".")[0] in ("transformers", "trl", "peft")]:
        for check in ("is_flash_attn_2_available", "is_flash_attn_available"):
            if callable(names.get(check)):
                yield swapped(names, check, _passes)
    utilities = sys.modules.get("transformers.modeling_flash_attention_utils")
    if utilities is not None:
        names = vars(utilities)
        for checks in names.get("FLASH_ATTENTION_COMPATIBILITY_MATRIX", {}).values():
            if checks.get("flash_attn_version") == 2:
                yield swapped(checks, "general_availability_check", _passes)
        if "_loaded_implementation" in names:
            yield swapped(names, "_loaded_implementation", None)
        if "lazy_import_flash_attention" not in names:  # releases that import at load time
            for function in (flash_attn_func, flash_attn_varlen_func, *PADDING):
                yield swapped(names, function.__name__, function)
            yield swapped(names, "_flash_supports_window_size", True)
    # 3. The model's own checks of package, device and precision.
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    answers = {
        "_flash_attn_can_dispatch": _passes,
        "_flash_attn_2_can_dispatch": _passes,
        "_check_and_enable_flash_attn_2": classmethod(_enable),
    }
    for name, answer in answers.items():
        if base is not None and name in vars(base):
            yield attribute(base, name, answer)


def _passes(*args: Any, **kwargs: Any) -> bool:
    return True


def _enable(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
    config._attn_implementation = "flash_attention_2"
    return config
