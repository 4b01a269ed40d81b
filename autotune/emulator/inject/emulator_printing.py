"""Printing of tensors on emulated cards: small ones from memory, larger ones without values."""

from __future__ import annotations

import importlib
from typing import Any

import torch

memory = importlib.import_module("emulator_memory")  # Python's path has this folder


def print_what_is_there() -> None:
    """Replace torch's printing, which leaves dispatch modes and reads every element through
    kernels; DeepSpeed prints tensors in passing.
    """
    import torch._tensor_str as printing

    text_of_torch = printing._str

    def text_of(tensor: Any, **options: Any) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cuda":
            return str(text_of_torch(tensor, **options))
        if tensor.numel() > memory.MOST_FLOATS:
            return (
                f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)},"
                f" dtype={tensor.dtype})"
            )
        text = str(text_of_torch(memory.alias(tensor.detach()), **options))
        return f"{text[:-1]}, device='{tensor.device}')" if text.endswith(")") else text

    printing._str = text_of
