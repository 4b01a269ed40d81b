"""What integers and booleans are, although every tensor is without memory.

Token ids, masks and positions are small and known: a plain run's decisions hang on them (is anything padded? how many tokens
are labelled?). They are computed for real beside the fake ones, so that those decisions come out as they would. What hangs on
floating-point numbers is not known; of those it is taken for granted that none is NaN or infinite.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .operands import tensors_in, with_tensors

aten = torch.ops.aten

LARGEST = 2**22
"""Elements: above it a value is not kept (a mask over all pairs of positions), and stands for itself nowhere."""

_NEVER = frozenset({aten.isnan.default, aten.isinf.default})
_MADE_EMPTY = frozenset({aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided})
"""What a plain run finds there is left to chance; here it is nothing."""


def of(tensor: Any) -> Any:
    """The real tensor behind it; None where it is not known."""
    if isinstance(tensor, FakeTensor):
        return getattr(tensor, "_known", None)
    return tensor


def learn(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Whatever can be known of this operation's result."""
    if type(out) is FakeTensor and (out.is_floating_point() or out.is_complex()):
        return
    made = tensors_in((out,))
    if not made or any(leaf.is_floating_point() or leaf.is_complex() or leaf.numel() > LARGEST for leaf in made):
        return
    if func in _NEVER:
        keep(out, _really(torch.zeros, (tuple(out.shape),), {"dtype": torch.bool}))
        return
    if any(of(leaf) is None for leaf in tensors_in((args, kwargs))):
        if func._schema.is_mutable:
            _forget(made)
        return
    real_args, real_kwargs = with_tensors(of, (args, kwargs))
    if "device" in real_kwargs:
        real_kwargs["device"] = torch.device("cpu")
    try:
        found = _really(func, real_args, real_kwargs)
    except (RuntimeError, IndexError, ValueError, NotImplementedError):
        _forget(made)
        return
    if func._overloadpacket in _MADE_EMPTY:
        found.zero_()
    for fake, real in zip(made, tensors_in((found,)), strict=True):
        keep(fake, real)


def really(func: Any, args: Any, kwargs: Any) -> Any:
    """What the operation gives on known operands; None where one is not known."""
    if any(of(leaf) is None for leaf in tensors_in((args, kwargs))):
        return None
    real_args, real_kwargs = with_tensors(of, (args, kwargs))
    return _really(func, real_args, real_kwargs)


def scalar(tensor: Any) -> Any:
    """`item()`: what is known, and something harmless where nothing is."""
    known = of(tensor)
    if known is not None:
        return _really(known.item, (), {})
    return True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1


def count(mask: Any) -> int | None:
    """How many elements of a mask are set; None where that is not known."""
    known = of(mask)
    return None if known is None else int(_really(lambda: known.count_nonzero().item(), (), {}))


def positions(mask: Any) -> list[Any] | None:
    """Where a mask is set, one tensor for each of its dimensions."""
    known = of(mask)
    return None if known is None else list(_really(torch.nonzero, (known,), {"as_tuple": True}))


def _really(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        return func(*args, **kwargs)


def keep(fake: Any, real: Any) -> None:
    if isinstance(fake, torch._subclasses.FakeTensor) and fake.shape == real.shape:
        fake._known = real


def _forget(tensors: Any) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch._subclasses.FakeTensor) and hasattr(tensor, "_known"):
            del tensor._known
