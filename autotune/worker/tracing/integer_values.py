"""Values of integer and boolean tensors, although no tensor has memory.

Token ids, masks and positions are small and decide the control flow (padding, number of labelled
tokens). They are computed with real tensors beside the fake ones. Values that depend on
floating-point numbers are unknown; those are assumed to be finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .operands import tensors_in, with_tensors

aten = torch.ops.aten

MAX_ELEMENTS = 2**22
"""Limit of elements; larger values (a mask over pairs of positions) are unknown."""

_ASSUMED_FALSE = frozenset({aten.isnan.default, aten.isinf.default})
_UNINITIALISED = frozenset(
    {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided}
)
"""Uninitialised memory counts as zero."""


# 1. Real tensors behind fake ones.


def of(tensor: Any) -> Any:
    """Return the real tensor behind a fake one; None if unknown."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "_known_value", None)
    return tensor


def keep(fake: Any, real: Any) -> None:
    if isinstance(fake, FakeTensor) and fake.shape == real.shape:
        fake._known_value = real


def _forget(tensors: list[Any]) -> None:
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) and hasattr(tensor, "_known_value"):
            del tensor._known_value


def outside(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function on real tensors, outside all dispatch modes."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return func(*args, **kwargs)


# 2. Values of results.


def learn(
    func: Any,
    args: Any,
    kwargs: Any,
    out: Any,
) -> None:
    """Record the value of an operation's result, if it can be computed."""
    if type(out) is FakeTensor and (out.is_floating_point() or out.is_complex()):
        return
    results = tensors_in((out,))
    if not results or not all(map(_may_be_known, results)):
        return
    if func in _ASSUMED_FALSE:
        keep(out, outside(torch.zeros, out.shape, dtype=torch.bool))
        return

    # 1. The operands' values.
    operands = _real_operands(args, kwargs)
    if operands is None:
        if func._schema.is_mutable:
            _forget(results)
        return
    real_args, real_kwargs = operands
    if "device" in real_kwargs:
        real_kwargs["device"] = torch.device("cpu")

    # 2. The result's.
    try:
        real_out = outside(func, *real_args, **real_kwargs)
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        _forget(results)
        return
    if func._overloadpacket in _UNINITIALISED:
        real_out.zero_()
    for fake, real in zip(results, tensors_in((real_out,)), strict=True):
        keep(fake, real)


def _may_be_known(result: Any) -> bool:
    if result.is_floating_point() or result.is_complex():
        return False
    return bool(result.numel() <= MAX_ELEMENTS)


def result_of(
    func: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Return the operation's result on known operands; None if one is unknown."""
    operands = _real_operands(args, kwargs)
    if operands is None:
        return None
    real_args, real_kwargs = operands
    return outside(func, *real_args, **real_kwargs)


def _real_operands(args: Any, kwargs: Any) -> Any:
    """Return both with values in place of fake tensors; None if one is unknown."""
    for tensor in tensors_in((args, kwargs)):
        if of(tensor) is None:
            return None
    return with_tensors(of, (args, kwargs))


# 3. Operations whose result, or its shape, depends on values.


def _scalar(
    func: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Return `item()`: the known value, else a neutral one."""
    tensor = args[0]
    real = of(tensor)
    if real is not None:
        return outside(real.item)
    if tensor.dtype is torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _comparison(
    func: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Return the known answer, else True."""
    answer = result_of(func, args, kwargs)
    return True if answer is None else answer


def _nonzero(
    func: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    mask = args[0]
    shape = (count(mask), mask.dim())
    positions = torch.empty(shape, dtype=torch.long, device=mask.device)
    return _with_value(positions, func, args)


def _masked_select(
    func: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    values, mask = args
    selected = torch.empty(count(mask), dtype=values.dtype, device=values.device)
    return _with_value(selected, func, args)


def _with_value(
    out: Any,
    func: Any,
    args: Any,
) -> Any:
    real = result_of(func, args, {})
    if real is not None:
        keep(out, real)
    return out


BY_VALUES: Mapping[Any, Callable[[Any, Any, Any], Any]] = {
    aten._local_scalar_dense.default: _scalar,
    aten.equal.default: _comparison,
    aten.is_nonzero.default: _comparison,
    aten.nonzero.default: _nonzero,
    aten.masked_select.default: _masked_select,
}
"""Operations that are replaced on fake tensors: function of the operation and its arguments."""


def count(mask: Any) -> int:
    """Return the number of set elements of a mask; of all elements if unknown."""
    real = of(mask)
    if real is None:
        return int(mask.numel())
    return int(outside(lambda: real.count_nonzero().item()))


def is_mask(index: Any) -> bool:
    return index is not None and index.dtype is torch.bool


def without_masks(indices: Any) -> list[Any]:
    """Return the indices with positions, one tensor per dimension, in place of each mask."""
    positions: list[Any] = []
    for index in indices:
        if is_mask(index):
            positions += _positions(index)
        else:
            positions.append(index)
    return positions


def _positions(mask: Any) -> list[Any]:
    """Return the positions of set elements, one tensor per dimension."""
    length = count(mask)
    positions = []
    for _ in range(mask.dim()):
        positions.append(torch.zeros(length, dtype=torch.long, device=mask.device))
    real_mask = of(mask)
    if real_mask is not None:
        real_positions = outside(torch.nonzero, real_mask, as_tuple=True)
        for position, real in zip(positions, real_positions, strict=False):
            keep(position, real)
    return positions
