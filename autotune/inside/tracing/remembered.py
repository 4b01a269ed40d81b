"""What operations gave, remembered: on tensors of the same form an operation gives a tensor of the same form.

A fake mode remembers this as well, but describes every operand in full to look it up, which takes longer than all else that
happens in a trace. What it does not remember (results that hang on data, or whose aliases are not plain) is not remembered here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor

from . import made
from .operands import tensors_in

aten = torch.ops.aten

MOST = 100_000
"""Results, over all traces of one process: beyond it all is forgotten."""

_PLAIN = frozenset(
    {int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format}
)  # 1, 1.0 and True are equal and lead to other results: so their kinds are looked at too
_NO_TAGS = tuple(
    tag
    for name in ("data_dependent_output", "dynamic_output_shape", "inplace_view")
    if (tag := getattr(torch.Tag, name, None)) is not None
)
_NEVER = frozenset(getattr(aten, name).default for name in ("lift", "lift_fresh", "lift_fresh_copy") if hasattr(aten, name))
_PLAIN_WITHOUT_MASKS = frozenset({aten.index.Tensor})
"""How long their results are hangs on data only where they are given a mask."""

_VIEWS_THAT_AUTOGRAD_TAKES_FOR_NONE = frozenset({aten._unsafe_view.default})
"""A fake mode does not remember these; every linear layer asks one, and their memory is their operand's, as a view's is."""

Key = tuple[object, ...]


class _Given(NamedTuple):
    """One result."""

    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dtype: Any = None
    offset: int = 0
    device: Any = None
    """None for what is no tensor of its own: one of the arguments, or a plain value."""

    argument: int = -1
    """Of all that was given, those by name last: the one that it is, or whose memory it shares."""

    value: int | None = None

    @property
    def is_new(self) -> bool:
        """Whether it has memory of its own."""
        return self.device is not None and self.argument < 0


class Remembered:
    """What an operation gave on operands of one form."""

    __slots__ = ("_given", "_kind", "amounts")

    def __init__(self, kind: type, given: Sequence[_Given]) -> None:
        self._kind, self._given = kind, tuple(given)
        self.amounts: dict[Any, Any] = {}
        """Whatever else follows from the form, for whom it is too long to find out each time."""

    def again(self, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any) -> Any:
        """The same of these operands."""
        operands = _operands(args, kwargs)
        if self._kind is FakeTensor:
            return _one(self._given[0], operands, mode)
        return self._kind(_one(given, operands, mode) for given in self._given)


_results: dict[Key, Remembered | None] = {}
"""None where it cannot be said in these words."""


def key_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key | None:
    """What the result's form hangs on; None where that is more than what this looks at."""
    found: list[object] = [id(func), torch.get_default_dtype()]
    if not _describe(args, found):
        return None
    if kwargs:
        found += kwargs
        if not _describe(kwargs.values(), found):
            return None
    return tuple(found)


def find(key: Key) -> Remembered | None:
    """None where there has been none yet."""
    return _results.get(key)


def note(key: Key, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any, out: Any) -> Remembered | None:
    """What it gave, if it can be told from the key alone."""
    if key not in _results:
        if len(_results) >= MOST:
            _results.clear()
        _results[key] = _said(key, func, args, kwargs, mode, out)
    return _results[key]


def _operands(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    return (*args, *kwargs.values()) if kwargs else args


def _describe(values: Any, found: list[object]) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided:
                return False
            found += (value.shape, value.stride(), value.dtype, value.storage_offset(), value.fake_device)
            found += (value.is_conj(), value.is_neg(), value.untyped_storage().nbytes())
        elif kind in _PLAIN:
            found += (kind, value)
        elif kind is list or kind is tuple:
            found += (kind, len(value))
            if not _describe(value, found):
                return False
        else:
            return False
    return True


def _one(given: _Given, operands: Sequence[Any], mode: Any) -> Any:
    if given.device is None:
        return given.value if given.argument < 0 else operands[given.argument]
    if given.argument < 0:
        return made.new(mode, given.shape, given.stride, given.dtype, given.device)
    return made.view(mode, operands[given.argument], given.shape, given.stride, given.offset, given.dtype)


def _said(key: Key, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: Any, out: Any) -> Remembered | None:
    kind = type(out)
    if kind not in (FakeTensor, tuple, list) or not _is_plain(func, args):
        return None
    if key_of(func, args, kwargs) != key:  # it changed what it was given
        return None
    operands = _operands(args, kwargs)
    several = [out] if kind is FakeTensor else list(out)
    given = [_given(one, func, operands) for one in several]
    said = tuple(one for one in given if one is not None)
    if len(said) < len(given) or _share_memory([one for one, how in zip(several, said, strict=True) if how.is_new]):
        return None
    found = Remembered(kind, said)
    once_more = found.again(args, kwargs, mode)
    forms = [_form(one) for one in ([once_more] if kind is FakeTensor else once_more)]
    return found if forms == [_form(one) for one in several] else None


def _share_memory(tensors: Sequence[Any]) -> bool:
    return len({one.untyped_storage()._cdata for one in tensors}) < len(tensors)


def _is_plain(func: Any, args: Sequence[Any]) -> bool:
    """As the fake mode has it: a result whose form hangs on those of the operands, and whose memory is its own or a view's."""
    if getattr(func, "namespace", None) not in ("aten", "prims") or func in _NEVER:
        return False
    if func in _PLAIN_WITHOUT_MASKS:
        return all(index.dtype not in (torch.bool, torch.uint8) for index in tensors_in(args[1]))
    if any(tag in func.tags for tag in _NO_TAGS):
        return False
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    is_view = getattr(func, "is_view", None)  # a torch that does not say is not relied on
    return is_view is False or (is_view is True and not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), composite))


def _given(one: Any, func: Any, operands: Sequence[Any]) -> _Given | None:
    if one is None or type(one) is int:
        return _Given(value=one)
    if type(one) is not FakeTensor:
        return None
    place = next((at for at, value in enumerate(operands) if value is one), None)
    if place is not None:
        return _Given(argument=place)
    if one.constant is not None or one.layout is not torch.strided or one.requires_grad or one.is_conj() or one.is_neg():
        return None
    memory = one.untyped_storage()._cdata
    shared = [at for at, value in enumerate(operands) if type(value) is FakeTensor and value.untyped_storage()._cdata == memory]
    others = [value.untyped_storage()._cdata for value in tensors_in(operands)]
    is_view = func.is_view or func in _VIEWS_THAT_AUTOGRAD_TAKES_FOR_NONE
    if bool(shared) != is_view or (not shared and memory in others) or (shared and _reaches_beyond(one)):
        return None
    return _Given(
        shape=tuple(one.shape), stride=one.stride(), dtype=one.dtype, offset=one.storage_offset(), device=one.fake_device,
        argument=shared[0] if shared else -1,
    )  # fmt: skip


def _reaches_beyond(view: Any) -> bool:
    """Whether its memory was given back, as sharded parameters' is: making the view once more would ask for it again."""
    last = view.storage_offset() + sum((count - 1) * step for count, step in zip(view.shape, view.stride(), strict=True))
    return bool(view.numel() and (last + 1) * view.element_size() > view.untyped_storage().nbytes())


def _form(value: Any) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    memory = value.untyped_storage()
    return value.shape, value.stride(), value.dtype, value.storage_offset(), value.device, value.requires_grad, memory.nbytes()
