"""What operations give that come with another row each time: told by a rule, for of these there is nothing to remember.

A batch's rows are lifted from numbers one by one, and each is copied to its place among the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import CONSTANT_NUMEL_LIMIT, FakeTensor

from . import made

aten = torch.ops.aten


def told(func: Any, args: Any, kwargs: Any, mode: Any) -> Any:
    """None where the rule does not say."""
    rule = _RULES.get(id(func))
    return rule(mode, *args) if rule is not None and not kwargs else None


def _lifted(mode: Any, real: Any) -> Any:
    """What `torch.tensor` has just made. Of a single number the mode keeps what it is."""
    plain = type(real) is torch.Tensor and real.layout is torch.strided and real.is_contiguous() and not real.requires_grad
    if not plain or real.numel() <= CONSTANT_NUMEL_LIMIT or real.untyped_storage().nbytes() != real.nbytes:
        return None
    return made.new(mode, real.shape, real.stride(), real.dtype, real.device)


def _selected(mode: Any, whole: Any, dim: int, index: int) -> Any:
    """One row."""
    if not _is_plain(whole) or not 0 <= dim < whole.dim() or not 0 <= index < whole.shape[dim]:
        return None
    if whole.untyped_storage().nbytes() < whole.numel() * whole.element_size() or not whole.is_contiguous():
        return None  # where memory was given back, as sharded parameters' is, a view would ask for it again
    shape, stride = list(whole.shape), list(whole.stride())
    shape.pop(dim)
    return made.view(mode, whole, shape, stride, whole.storage_offset() + index * stride.pop(dim), whole.dtype)


def _copied(mode: Any, target: Any, source: Any) -> Any:
    return target if _is_plain(target) and _is_plain(source) and target.shape == source.shape else None


def _is_plain(value: Any) -> bool:
    return (
        type(value) is FakeTensor
        and value.constant is None
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )


_RULES: Mapping[int, Callable[..., Any]] = {
    id(aten.lift_fresh.default): _lifted,
    id(aten.select.int): _selected,
    id(aten.copy_.default): _copied,
}
"""By the operation's id: operations live as long as torch does, and hashing one calls Python."""
