"""Values of integer and boolean tensors, although no tensor has memory.

Token ids, masks and positions are small and decide the control flow (padding, number of labelled
tokens). They are computed with real tensors beside the fake ones. Values that depend on
floating-point numbers are unknown; those are assumed to be finite.
"""

from __future__ import annotations

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


def of(tensor: Any) -> Any:
    """Return the real tensor behind a fake one; None if unknown."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "_known", None)
    return tensor


def learn(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Record the value of an operation's result, if it can be computed."""
    if type(out) is FakeTensor and (out.is_floating_point() or out.is_complex()):
        return
    made = tensors_in((out,))
    if not made or any(
        leaf.is_floating_point() or leaf.is_complex() or leaf.numel() > MAX_ELEMENTS
        for leaf in made
    ):
        return
    if func in _ASSUMED_FALSE:
        keep(out, outside(torch.zeros, tuple(out.shape), dtype=torch.bool))
        return
    if (known := _known(args, kwargs)) is None:
        if func._schema.is_mutable:
            _forget(made)
        return
    real_args, real_kwargs = known
    if "device" in real_kwargs:
        real_kwargs["device"] = torch.device("cpu")
    try:
        found = outside(func, *real_args, **real_kwargs)
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        _forget(made)
        return
    if func._overloadpacket in _UNINITIALISED:
        found.zero_()
    for fake, real in zip(made, tensors_in((found,)), strict=True):
        keep(fake, real)


def really(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the operation's result on known operands; None if one is unknown."""
    known = _known(args, kwargs)
    return None if known is None else outside(func, *known[0], **known[1])


def _known(*operands: Any) -> Any:
    """Return the operands with their values; None if one is unknown."""
    return (
        None
        if any(of(leaf) is None for leaf in tensors_in(operands))
        else with_tensors(of, operands)
    )


def scalar(tensor: Any) -> Any:
    """Return `item()`: the known value, else a neutral one."""
    known = of(tensor)
    if known is not None:
        return outside(known.item)
    return True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1


def count(mask: Any) -> int:
    """Return the number of set elements of a mask; of all elements if unknown."""
    known = of(mask)
    return int(mask.numel() if known is None else outside(lambda: known.count_nonzero().item()))


def positions(mask: Any) -> list[Any] | None:
    """Return the positions of set elements, one tensor per dimension; None if unknown."""
    known = of(mask)
    return None if known is None else list(outside(torch.nonzero, known, as_tuple=True))


def outside(func: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a function on real tensors, outside all dispatch modes."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return func(*args, **kwargs)


def keep(fake: Any, real: Any) -> None:
    if isinstance(fake, FakeTensor) and fake.shape == real.shape:
        fake._known = real


def _forget(tensors: Any) -> None:
    for tensor in tensors:
        if isinstance(tensor, FakeTensor) and hasattr(tensor, "_known"):
            del tensor._known
