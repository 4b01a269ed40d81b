"""Operands of an operation: a walk over their tensors, and the bytes and FLOPs of the operation.

Tensors are nested in lists, tuples and dicts only. torch's own walk looks up the type of every node
and takes many times as long; a step needs tens of thousands of walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from .attention_flops import MARK, AttentionFlops


def tensors_in(values: Iterable[Any]) -> list[Any]:
    """Return all tensors, in the order of torch's own walk."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def with_tensors(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([with_tensors(change, one) for one in value])
    if kind is dict:
        return {name: with_tensors(change, one) for name, one in value.items()}
    return value


class OperationCost(NamedTuple):
    moved_bytes: int
    """Bytes of all operands and results, each counted once."""

    flops: float = 0.0
    dtype: str = ""
    """Type of the computation, marked for attention; empty without matrix products."""


def cost_of(
    formula: Callable[..., float] | None,
    written: Sequence[int],
    cached: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
) -> OperationCost:
    """Return the cost, computed once per cached result.

    formula: FLOPs; written: positions of arguments that an operation without a result changes.
    """
    if cached is None:
        return _computed_cost(formula, written, args, kwargs, out)
    if formula not in cached.costs:
        cached.costs[formula] = _computed_cost(formula, written, args, kwargs, out)
    found: OperationCost = cached.costs[formula]
    return found


def _computed_cost(
    formula: Callable[..., float] | None, written: Sequence[int], args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> OperationCost:
    operands = tensors_in((*args, *kwargs.values()))
    changed = tensors_in([args[position] for position in written if position < len(args)])
    moved = sum([tensor.numel() * tensor.element_size() for tensor in (*operands, *changed, *tensors_in((out,)))])
    if formula is None or not operands:
        return OperationCost(moved)
    plain = [value for value in args if not isinstance(value, torch.dtype)]  # products with a dtype to accumulate in
    dtype = str(operands[0].dtype).removeprefix("torch.")
    if isinstance(formula, AttentionFlops):
        dtype = MARK + dtype
    return OperationCost(moved, formula(*plain, **kwargs, out_val=out), dtype)
