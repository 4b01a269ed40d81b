"""What one operation moves and computes, by the shapes of what it takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .operands import tensors_in
from .remembered import Remembered


class Amounts(NamedTuple):
    moved_bytes: int
    """Read and written once."""

    flops: float = 0.0
    dtype: str = ""
    """In which it computes; empty where it computes nothing worth counting."""


def amounts_of(
    formula: Callable[..., float] | None, known: Remembered | None, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Amounts:
    """`formula` counts the operation's products. What is remembered by the operands' forms is counted once."""
    if known is None:
        return _counted(formula, args, kwargs, out)
    if formula not in known.amounts:
        known.amounts[formula] = _counted(formula, args, kwargs, out)
    found: Amounts = known.amounts[formula]
    return found


def _counted(formula: Callable[..., float] | None, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Amounts:
    operands = tensors_in((*args, *kwargs.values()))
    moved = sum([tensor.numel() * tensor.element_size() for tensor in (*operands, *tensors_in((out,)))])
    if formula is None or not operands:
        return Amounts(moved)
    plain = [value for value in args if not isinstance(value, torch.dtype)]  # products that say what they add up in
    dtype = str(operands[0].dtype).removeprefix("torch.")
    return Amounts(moved, formula(*plain, **kwargs, out_val=out), dtype)
