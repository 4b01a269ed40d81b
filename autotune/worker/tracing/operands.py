"""Operands of an operation: a walk over their tensors, and the bytes and FLOPs of the operation.

Tensors are nested in lists, tuples and dicts only. torch's own walk looks up the type of every node
and takes many times as long; a step needs tens of thousands of walks.

FLOPs of an attention kernel are counted here, with a sum over all pairs of query and key that the
mask leaves:

    forward    2 x pairs x (s + v)              s: size of a query and a key, v: of a value
    backward   2 x pairs x (3 s + 2 v)

torch's own counters of FLOPs ignore causal masks and windows, reject shared key heads, and read the
layout of `_flash_attention_forward` (row, head, size) as that of `scaled_dot_product_attention`
(head, row, size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

_WITH_ADDEND = frozenset(
    {flop_registry[torch.ops.aten.addmm], flop_registry[torch.ops.aten.baddbmm]}
)
"""Formulas of products whose first operand is a sum that they are added to, in a type of its own:
the LM head's gradients are summed in float32 and multiplied in bfloat16.
"""


def tensors_in(values: Iterable[Any]) -> list[Any]:
    """Return all tensors, in the order of torch's own walk."""
    tensors: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += tensors_in(value)
        elif isinstance(value, dict):
            tensors += tensors_in(value.values())
    return tensors


def with_tensors(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a copy with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([with_tensors(change, item) for item in value])
    if kind is dict:
        return {name: with_tensors(change, item) for name, item in value.items()}
    return value


def cost_of(
    formula: Callable[..., float] | None,
    written: Sequence[int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    out: Any,
) -> tuple[int, float, str]:
    """Return the bytes of all operands and results, each counted once, the FLOPs and the type that
    they are computed in.

    formula: FLOPs, None without matrix products; written: positions of arguments that an operation
    without a result changes.
    """
    # 1. Bytes.
    all_args = (*args, *kwargs.values())
    operands = tensors_in(all_args)
    written_args = [args[position] for position in written if position < len(args)]
    changed = tensors_in(written_args)
    tensors = (*operands, *changed, *tensors_in((out,)))
    moved = sum([tensor.numel() * tensor.element_size() for tensor in tensors])

    # 2. FLOPs.
    if formula is None or not operands:
        return moved, 0.0, ""
    # Some products have a dtype to accumulate in, which no formula expects.
    without_dtypes = [value for value in args if not isinstance(value, torch.dtype)]
    factor = operands[1] if formula in _WITH_ADDEND else operands[0]
    dtype = str(factor.dtype).removeprefix("torch.")
    if isinstance(formula, AttentionFlops):
        dtype = ATTENTION_MARK + dtype
    return moved, formula(*without_dtypes, **kwargs, out_val=out), dtype


ATTENTION_MARK = "attention:"
"""Prefix of the dtype under which these FLOPs are counted: they run at a lower share of the
peak.
"""

_ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_flash_attention_forward",
        "_flash_attention_backward",
        "flash3_varlen",
        "flash3_varlen_backward",
    }
)


@dataclass(frozen=True)
class AttentionFlops:
    """Formula of one kernel: 2 · (query, key) pairs · sizes of its products."""

    arguments: tuple[str, ...]
    rows_first: bool  # layout row, head, size
    backward: bool

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
        arguments = dict(zip(self.arguments, args, strict=False))
        arguments.update(kwargs)
        query = arguments["query"].shape
        value = arguments["value"].shape
        # Forward: scores, and scores with values. Backward: scores again, and both sides of the
        # two.
        size = query[-1] + value[-1]
        if self.backward:
            size = 3 * query[-1] + 2 * value[-1]

        if "pairs" in arguments:  # of sequences with different lengths, per head
            return float(2 * arguments["pairs"] * query[-2] * size)
        keys = arguments["max_k"] if self.rows_first else arguments["key"].shape[-2]
        rows = query.numel() / query[-1]
        keys_per_row = seen_keys(
            int(keys),
            causal=bool(arguments.get("is_causal")),
            window=arguments.get("window_size_left"),
        )
        return float(2 * rows * keys_per_row * size)


def seen_keys(
    keys: int,
    *,
    causal: bool,
    window: int | None,
) -> float:
    """Return the keys that a query attends to, in the mean over the queries of a row."""
    if not causal:
        return keys
    if window is None or window < 0 or window >= keys:
        return keys / 2
    return window - window * window / (2 * keys)


def flops_of(packet: Any, arguments: Sequence[Any]) -> Callable[..., float] | None:
    """Return the formula of an operation, from its packet and its schema's arguments; None without
    matrix products.
    """
    name = str(packet).rsplit(".", 1)[-1]
    if name not in _ATTENTION:
        return flop_registry.get(packet)  # type: ignore[no-any-return]
    return AttentionFlops(
        arguments=tuple(argument.name for argument in arguments),
        rows_first=name.startswith("_flash"),
        backward=name.endswith("_backward"),
    )
