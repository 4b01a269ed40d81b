"""Sees every operation on fake tensors, and books the storages that live on the device.

With a dispatch mode on, C++ autograd takes out-of-place paths that a plain run does not take (adding up gradients,
`gather`'s backward): there the result is booked in place of the operand whose memory it would have reused.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from . import Untraceable, remembered, values
from .amounts import Amounts, amounts_of
from .ledger import Ledger
from .remembered import Remembered
from .told import told

aten = torch.ops.aten

Workspace = Callable[[tuple[Any, ...], Mapping[str, Any], Any], int]
"""Bytes that an operation's kernel takes and gives back inside, from its arguments and its result."""

VIEWS = frozenset(
    "view transpose t expand detach unsqueeze _unsafe_view slice select squeeze permute alias split split_with_sizes "  # noqa: SIM905
    "as_strided unbind _reshape_alias lift_fresh chunk diagonal unfold view_as_real view_as_complex".split()
)
"""Operations that launch nothing and move nothing."""


class _About:
    """What is to be known of one operation, looked up once: a step asks tens of thousands of times."""

    __slots__ = ("flops", "is_heir", "launches", "question", "workspace")

    def __init__(self, func: Any, workspace: Workspace | None) -> None:
        packet = getattr(func, "_overloadpacket", None)
        self.question = _QUESTIONS.get(func)
        self.launches = str(packet).rsplit(".", 1)[-1] not in VIEWS and getattr(func, "namespace", "") != "prim"
        self.flops = flop_registry.get(packet)
        self.is_heir = func in _IN_PLACE_IN_EARNEST
        self.workspace = workspace


class _Booked:
    """One live storage."""

    __slots__ = ("number", "ref", "size")

    def __init__(self, number: int, size: int, ref: Any) -> None:
        self.number, self.size, self.ref = number, size, ref


class Tracker(TorchDispatchMode):  # type: ignore[misc]
    """Enter it inside a FakeTensorMode; whatever is then made on `device` is in the ledger."""

    def __init__(self, ledger: Ledger, *, device: str = "cpu", workspaces: Mapping[Any, Workspace] | None = None) -> None:
        super().__init__()
        self.ledger = ledger
        self.paused = False
        self.guess_length: Callable[[Any], int] = lambda mask: int(mask.numel())
        self.flops: dict[tuple[str, str], float] = defaultdict(float)
        self.moved: dict[str, float] = defaultdict(float)
        self.kernels: dict[str, int] = defaultdict(int)
        self.in_layers: dict[tuple[str, str], float] = defaultdict(float)
        self.vocabulary: frozenset[int] = frozenset()
        self._device = device
        self._workspaces = dict(workspaces or {})
        self._known: dict[int, _About] = {}
        """By the operation's id: operations live as long as torch does, and hashing one calls Python."""
        self._live: dict[int, _Booked] = {}
        self._donated: tuple[Any, int, _Booked, int] | None = None
        self._part: str | None = None
        self._mode: Any = None

    def __enter__(self) -> Tracker:
        around = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, fake_tensor.FakeTensorMode)]
        self._mode = around[-1] if around else None
        return super().__enter__()  # type: ignore[no-any-return]

    # What the step's driver says about it.

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """What is allocated meanwhile is this, whatever it looks like."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    @contextmanager
    def not_looking(self) -> Iterator[None]:
        """For what a plain run would not allocate."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def call_it(self, tensors: Any, part: str) -> None:
        """These tensors' storages are this, as is known now."""
        for tensor in _plain(tensors):
            booked = self._booked(tensor.untyped_storage())
            if booked is not None:
                self.ledger.call_it(booked.number, part)

    def book(self, tensor: Any) -> None:
        """A tensor that was made out of sight."""
        if not self.paused:
            self._book(tensor)

    def forget_work(self) -> None:
        """Count from here: the last optimizer step is what is reported."""
        for counted in (self.flops, self.moved, self.kernels, self.in_layers):
            counted.clear()

    @contextmanager
    def standing_for(self, repeats: float) -> Iterator[None]:
        """What is done meanwhile is done so many times over: the work counts as often, memory is what it is."""
        counts: list[dict[Any, Any]] = [self.flops, self.moved, self.kernels, self.in_layers]
        before = [dict(count) for count in counts]
        yield
        for count, earlier in zip(counts, before, strict=True):
            for key, now in count.items():
                count[key] = earlier.get(key, 0) + type(now)((now - earlier.get(key, 0)) * repeats)

    # What torch says.

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """torch wraps every mode's dispatch so that nobody compiles it; nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types != _FAKE and any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its local operations come by themselves
        about = self._known.get(id(func)) or self._know(func)
        if about.question is not None:
            return about.question(args)
        kwargs = kwargs or {}
        if self._donated is not None:
            self._settle_donation()
        out, known = self._run(func, args, kwargs)
        if self.paused:
            return out
        if about.launches:
            self._count(amounts_of(about.flops, known, args, kwargs, out))
        if about.is_heir and self._reuses_its_operand(func, args) and self._book_in_place(args[0], out):
            return out
        for tensor in _plain(out):
            self._book(tensor)
        if about.workspace is not None and (size := about.workspace(args, kwargs, out)) > 0:
            self.ledger.free(self.ledger.allocate(size, "workspaces"))
        return out

    def _know(self, func: Any) -> _About:
        found = self._known[id(func)] = _About(func, self._workspaces.get(func))
        return found

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Remembered | None]:
        """The operation on fake tensors; where its result hangs on data, the data that are known, or else a guess; and
        what is remembered of operands of such forms."""
        if func is aten._local_scalar_dense.default:
            return values.scalar(args[0]), None
        if func in (aten.equal.default, aten.is_nonzero.default):
            real = values.really(func, args, kwargs)
            return True if real is None else real, None
        if func in (aten.nonzero.default, aten.masked_select.default):
            return self._of_guessed_length(func, args), None
        masked = func in (aten.index.Tensor, aten.index_put_.default) and any(_is_mask(index) for index in args[1])
        if masked and func is aten.index_put_.default:
            return args[0], None
        if masked:
            args = (args[0], self._as_positions(args[1]), *args[2:])
        out, known = self._on_fakes(func, args, kwargs)
        values.learn(func, args, kwargs, out)
        return out, None if masked else known

    def _on_fakes(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Remembered | None]:
        if (row := told(func, args, kwargs, self._mode)) is not None:
            return row, None
        key = remembered.key_of(func, args, kwargs)
        if key is not None and (known := remembered.find(key)) is not None:
            return known.again(args, kwargs, self._mode), known
        try:
            out = func(*args, **kwargs)
        except fake_tensor.UnsupportedFakeTensorException as error:
            raise Untraceable(f"{func} cannot be followed without data: {error}") from error
        except (fake_tensor.DynamicOutputShapeException, fake_tensor.DataDependentOutputException) as error:
            real = values.really(func, args, kwargs)
            if real is None:
                raise Untraceable(f"what {func} gives depends on data") from error
            return real, None
        return out, None if key is None else remembered.note(key, func, args, kwargs, self._mode, out)

    def _length_of(self, mask: Any) -> int:
        """How many elements are set."""
        known = values.count(mask)
        return self.guess_length(mask) if known is None else known

    def _of_guessed_length(self, func: Any, args: Any) -> Any:
        if func is aten.nonzero.default:
            shape: tuple[int, ...] = (self._length_of(args[0]), args[0].dim())
            out = torch.empty(shape, dtype=torch.long, device=args[0].device)
        else:
            out = torch.empty((self._length_of(args[1]),), dtype=args[0].dtype, device=args[0].device)
        known = values.really(func, args, {})
        if known is not None and known.shape == out.shape:
            values.keep(out, known)
        return out

    def _as_positions(self, indices: Any) -> list[Any]:
        positions: list[Any] = []
        for index in indices:
            if not _is_mask(index):
                positions.append(index)
                continue
            length = self._length_of(index)
            places = [torch.zeros(length, dtype=torch.long, device=index.device) for _ in range(index.dim())]
            for place, real in zip(places, values.positions(index) or (), strict=False):
                values.keep(place, real)
            positions += places
        return positions

    def _count(self, amounts: Amounts) -> None:
        phase = self.ledger.phase
        self.moved[phase] += amounts.moved_bytes
        self.kernels[phase] += 1
        if amounts.dtype:
            self.flops[phase, amounts.dtype] += amounts.flops
        if self.ledger.layer is not None:
            self.in_layers[phase, "moved_bytes"] += amounts.moved_bytes
            self.in_layers[phase, "kernels"] += 1
            if amounts.dtype:
                self.in_layers[phase, amounts.dtype] += amounts.flops

    # Storages.

    def _book(self, tensor: Any) -> None:
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        booked = self._booked(storage)
        if booked is not None:
            if booked.size != size:
                self.resized(storage, size)
            return
        if size:
            self._add(storage, self.ledger.allocate(size, self._part or self._part_of(tensor)), size)

    def resized(self, storage: Any, size: int) -> None:
        """A storage that changed its size in place, as sharded parameters do."""
        if self.paused or (storage._cdata not in self._live and storage.device.type != self._device):
            return
        booked = self._booked(storage)
        if booked is None:
            if size:
                self._add(storage, self.ledger.allocate(size, self._part or "communication"), size)
            return
        part_number = self.ledger.parts[booked.number]
        if booked.size:
            self.ledger.free(booked.number)
        booked.size = size
        if size:
            booked.number = self.ledger.allocate(size, "activations")
            self.ledger.parts[booked.number] = part_number

    def _part_of(self, tensor: Any) -> str:
        if self.ledger.phase == "load":
            return "weights"
        if self.ledger.phase == "optimizer":
            return "workspaces"  # unless it stays, as state: `call_it` says so then
        if tensor.dim() >= 2 and tensor.shape[-1] in self.vocabulary:
            return "logits"
        return "activations"

    def _booked(self, storage: Any) -> _Booked | None:
        booked = self._live.get(storage._cdata)
        return booked if booked is not None and booked.ref() is not None else None

    def _add(self, storage: Any, number: int, size: int) -> None:
        key = storage._cdata
        self._live[key] = _Booked(number, size, weakref.ref(storage, lambda ref: self._gone(key, ref)))

    def _gone(self, key: int, ref: Any) -> None:
        booked = self._live.get(key)
        if booked is not None and booked.ref is ref:
            del self._live[key]
            if booked.size:
                self.ledger.free(booked.number)

    # The paths that only a dispatch mode takes.

    def _reuses_its_operand(self, func: Any, args: Any) -> bool:
        """Whether autograd asks for it, which in a plain run writes over the first operand if nobody else holds that."""
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        operand = args[0]
        if func is not aten.add.Tensor and operand.untyped_storage().nbytes() != operand.numel() * operand.element_size():
            return False
        return _asked_by_the_engine()

    def _book_in_place(self, operand: Any, out: Any) -> bool:
        """Book the result under the allocation of its operand. Taken back if the operand turns out to live on."""
        storage, key = out.untyped_storage(), operand.untyped_storage()._cdata
        booked = self._live.get(key)
        if out.device.type != self._device or booked is None or booked.size != storage.nbytes() or key == storage._cdata:
            return False
        del self._live[key]
        self._add(storage, booked.number, booked.size)
        self._donated = (booked.ref, key, booked, storage._cdata)
        return True

    def _settle_donation(self) -> None:
        assert self._donated is not None
        ref, _, booked, heir = self._donated
        self._donated = None
        operand = ref()
        if operand is None:
            return
        self._add(operand, booked.number, booked.size)
        if heir in self._live:
            taken = self._live[heir]
            taken.number = self.ledger.allocate(booked.size, self._part or "activations")


_QUESTIONS: Mapping[Any, Callable[[Any], Any]] = getattr(fake_tensor, "_DISPATCH_META_HANDLERS", {})
"""What asks a fake tensor about itself, as which device it is on: more than half of all calls, and nothing happens in them."""

_IN_PLACE_IN_EARNEST = frozenset({aten.add.Tensor, aten.scatter_add.default, aten.index_put.default})

_FAKE = (fake_tensor.FakeTensor,)

_ON_THE_WAY = (__file__, "_compile.py", "eval_frame.py", "_python_dispatch.py")
"""Files of what lies between an operation and the tracker."""


def _asked_by_the_engine() -> bool:
    """Autograd's engine runs from inside one Python function, and so do derivatives that are not written in Python."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.endswith(_ON_THE_WAY):
        frame = frame.f_back
    return (
        frame is not None
        and frame.f_code.co_name in ("_engine_run_backward", "backward", "grad")
        and (frame.f_globals.get("__name__", "").startswith("torch.autograd"))
    )


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype is torch.bool


def _plain(tree: Any) -> Iterator[Any]:
    """Every tensor in it; of a wrapper, those it wraps."""
    if type(tree) is fake_tensor.FakeTensor:
        yield tree
        return
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            for name in leaf.__tensor_flatten__()[0]:
                yield from _plain(getattr(leaf, name))
        else:
            yield leaf
