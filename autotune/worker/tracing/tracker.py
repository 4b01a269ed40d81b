"""Dispatch mode that records the storages of every operation on fake tensors.

With a dispatch mode on, C++ autograd takes out-of-place paths that a plain run does not take
(accumulation of gradients, `gather`'s backward). There the result is recorded in place of the
operand whose memory it would have reused.
"""

from __future__ import annotations

import sys
import weakref
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

from . import Untraceable, dispatch_cache, integer_values
from .dispatch_cache import CachedResult
from .ledger import Ledger
from .operands import cost_of, flops_of
from .workspaces import Workspace

aten = torch.ops.aten

VIEWS = frozenset(
    "view transpose t expand detach unsqueeze _unsafe_view slice select squeeze permute alias split split_with_sizes "  # noqa: SIM905
    "as_strided unbind _reshape_alias lift_fresh chunk diagonal unfold view_as_real view_as_complex".split()
)
"""Operations without a kernel."""


class _OperationInfo:
    """Properties of one operation, looked up once: a step has tens of thousands of calls."""

    __slots__ = ("accumulates", "flops", "launches", "multiplies", "query", "workspace", "written")

    def __init__(self, func: Any, workspace: Workspace | None) -> None:
        packet = getattr(func, "_overloadpacket", None)
        self.query = _QUERIES.get(func)
        self.launches = (
            str(packet).rsplit(".", 1)[-1] not in VIEWS and getattr(func, "namespace", "") != "prim"
        )
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema else ()
        self.flops = flops_of(packet, arguments)
        # Lists of tensors are changed in place and not returned.
        nothing = schema is not None and not schema.returns
        self.written = tuple(
            at
            for at, one in enumerate(arguments)
            if nothing and one.alias_info and one.alias_info.is_write
        )
        self.accumulates = func in _ACCUMULATING
        self.multiplies = packet in _PRODUCTS
        self.workspace = workspace


class _Storage:
    """A live storage in the ledger."""

    __slots__ = ("number", "ref", "size")

    def __init__(self, number: int, size: int, ref: Any) -> None:
        self.number, self.size, self.ref = number, size, ref


class Tracker(TorchDispatchMode):  # type: ignore[misc]
    """Dispatch mode that records all allocations on `device`; enter it in a FakeTensorMode."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        device: str = "cpu",
        workspaces: Mapping[Any, Workspace] | None = None,
    ) -> None:
        super().__init__()
        self.ledger = ledger
        self.paused = False
        self.vocabulary: frozenset[int] = frozenset()
        self._device = device
        self._workspaces = dict(workspaces or {})
        self._known: dict[
            int, _OperationInfo
        ] = {}  # operations by id: they are never freed, and hashing one calls Python
        self._live: dict[int, _Storage] = {}
        self._donated: tuple[_Storage, int] | None = (
            None  # the operand's, and the memory of the result
        )
        self._part: str | None = None
        self._mode: Any = None

    def __enter__(self) -> Tracker:
        around = [
            mode
            for mode in _get_current_dispatch_mode_stack()
            if isinstance(mode, fake_tensor.FakeTensorMode)
        ]
        self._mode = around[-1] if around else None
        return super().__enter__()  # type: ignore[no-any-return]

    # Interface of the step's driver.

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """Record allocations as this part, whatever they look like."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Record nothing: for work that a plain run does not do."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def set_part(self, tensors: Any, part: str) -> None:
        """Set the part of these tensors' storages."""
        for tensor in _plain(tensors):
            booked = self._booked(tensor.untyped_storage())
            if booked is not None:
                self.ledger.set_part(booked.number, part)

    def book(self, tensor: Any) -> None:
        """Record a tensor that no operation made."""
        if not self.paused:
            self._book(tensor)

    # Interface of torch.

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: skip torch's wrapper against compilation; nothing is compiled here."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types != _FAKE and any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its local operations are dispatched separately
        info = self._known.get(id(func))
        if info is None:
            info = self._known[id(func)] = _OperationInfo(func, self._workspaces.get(func))
        if info.query is not None:
            return info.query(args)
        kwargs = kwargs or {}
        if self._donated is not None:
            self._settle_donation()
        out, known = self._run(func, args, kwargs)
        if self.paused:
            return out
        if info.launches:
            costs = {} if known is None else known.costs
            if info.flops not in costs:
                costs[info.flops] = cost_of(info.flops, info.written, args, kwargs, out)
            self.ledger.count(*costs[info.flops])
        if (
            info.accumulates
            and self._reuses_its_operand(func, args)
            and self._book_in_place(args[0], out)
        ):
            return out
        for tensor in _plain(out):
            self._book(tensor)
        if info.multiplies:
            self.ledger.note_product()
        if info.workspace is not None:
            self._book_workspace(info.workspace(args, kwargs, out))
        return out

    def _book_workspace(self, sizes: int | tuple[int, ...]) -> None:
        each = (sizes,) if isinstance(sizes, int) else sizes
        blocks = [self.ledger.allocate(size, "workspaces") for size in each if size > 0]
        for number in reversed(blocks):  # local tensors of a C++ function
            self.ledger.free(number)

    def _run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, CachedResult | None]:
        """Run the operation on fake tensors, with known values where the shape depends on data;
        return its cached form too.
        """
        if func is aten._local_scalar_dense.default:
            return integer_values.scalar(args[0]), None
        if func in (aten.equal.default, aten.is_nonzero.default):
            real = integer_values.really(func, args, kwargs)
            return True if real is None else real, None
        if func in (aten.nonzero.default, aten.masked_select.default):
            return self._selected(func, args), None
        masked = func in (aten.index.Tensor, aten.index_put_.default) and any(
            _is_mask(index) for index in args[1]
        )
        if masked and func is aten.index_put_.default:
            return args[0], None
        if masked:
            args = (args[0], self._positions_of(args[1]), *args[2:])
        out, known = self._on_fakes(func, args, kwargs)
        integer_values.learn(func, args, kwargs, out)
        return out, None if masked else known

    def _on_fakes(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, CachedResult | None]:
        if (row := dispatch_cache.by_rule(func, args, kwargs, self._mode)) is not None:
            return row, None
        key = dispatch_cache.key_of(func, args, kwargs)
        if key is not None and (known := dispatch_cache.find(key)) is not None:
            return known.again(args, kwargs, self._mode), known
        try:
            out = func(*args, **kwargs)
        except fake_tensor.UnsupportedFakeTensorException as error:
            raise Untraceable(f"{func} cannot be traced without data: {error}") from error
        except (
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.DataDependentOutputException,
        ) as error:
            real = integer_values.really(func, args, kwargs)
            if real is None:
                raise Untraceable(f"{func}: the result depends on data") from error
            return real, None
        return out, (
            None if key is None else dispatch_cache.note(key, func, args, kwargs, self._mode, out)
        )

    def _selected(self, func: Any, args: Any) -> Any:
        finds = func is aten.nonzero.default
        shape = (
            (integer_values.count(args[0]), args[0].dim())
            if finds
            else (integer_values.count(args[1]),)
        )
        out = torch.empty(
            shape, dtype=torch.long if finds else args[0].dtype, device=args[0].device
        )
        if (known := integer_values.really(func, args, {})) is not None:
            integer_values.keep(out, known)
        return out

    def _positions_of(self, indices: Any) -> list[Any]:
        positions: list[Any] = []
        for index in indices:
            if not _is_mask(index):
                positions.append(index)
                continue
            places = [
                torch.zeros(integer_values.count(index), dtype=torch.long, device=index.device)
                for _ in range(index.dim())
            ]
            for place, real in zip(places, integer_values.positions(index) or (), strict=False):
                integer_values.keep(place, real)
            positions += places
        return positions

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
            self._add(
                storage, self.ledger.allocate(size, self._part or self._part_of(tensor)), size
            )

    def resized(self, storage: Any, size: int) -> None:
        """Record a storage resized in place, as sharded parameters are."""
        if self.paused or (
            storage._cdata not in self._live and storage.device.type != self._device
        ):
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
            return "workspaces"  # state that stays is corrected with `set_part`
        if tensor.dim() >= 2 and tensor.shape[-1] in self.vocabulary:
            return "logits"
        return "activations"

    def _booked(self, storage: Any) -> _Storage | None:
        booked = self._live.get(storage._cdata)
        return booked if booked is not None and booked.ref() is not None else None

    def _add(self, storage: Any, number: int, size: int) -> None:
        key = storage._cdata

        def gone(ref: Any) -> None:
            booked = self._live.get(key)
            if booked is not None and booked.ref is ref:
                del self._live[key]
                if booked.size:
                    self.ledger.free(booked.number)

        self._live[key] = _Storage(number, size, weakref.ref(storage, gone))

    # Out-of-place paths of a dispatch mode.

    def _reuses_its_operand(self, func: Any, args: Any) -> bool:
        """Return True if autograd calls it and would overwrite the first operand in a plain run."""
        if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
            return False
        operand = args[0]
        if operand._base is not None:
            # a view holds its base, so that the sum has not the last reference to the memory
            return False
        if func is not aten.add.Tensor and operand.untyped_storage().nbytes() != operand.nbytes:
            return False
        return _called_by_engine()

    def _book_in_place(self, operand: Any, out: Any) -> bool:
        """Record the result as its operand's allocation; undone if the operand is still live
        next.
        """
        storage, key = out.untyped_storage(), operand.untyped_storage()._cdata
        booked = self._live.get(key)
        if (
            out.device.type != self._device
            or booked is None
            or booked.size != storage.nbytes()
            or key == storage._cdata
        ):
            return False
        del self._live[key]
        self._add(storage, booked.number, booked.size)
        self._donated = booked, storage._cdata
        return True

    def _settle_donation(self) -> None:
        assert self._donated is not None
        booked, heir = self._donated
        self._donated = None
        operand = booked.ref()
        if operand is None:
            return
        self._add(operand, booked.number, booked.size)
        if heir in self._live:
            self._live[heir].number = self.ledger.allocate(booked.size, self._part or "activations")


_QUERIES: dict[Any, Callable[[Any], Any]] = dict(
    getattr(fake_tensor, "_DISPATCH_META_HANDLERS", {})
)
"""Queries of a fake tensor, such as its device: more than half of all calls, and without effect."""

if torch.distributed.is_available():  # it returns its argument; its fake kernel makes a tensor
    _QUERIES[torch.ops._c10d_functional.wait_tensor.default] = lambda arguments: arguments[0]

_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
"""Operations of cuBLAS."""

_ACCUMULATING = frozenset({aten.add.Tensor, aten.scatter_add.default, aten.index_put.default})

_FAKE = (fake_tensor.FakeTensor,)

_INTERMEDIATE_FILES = (__file__, "_compile.py", "eval_frame.py", "_python_dispatch.py")
"""Files on the stack between an operation and the tracker."""


def _called_by_engine() -> bool:
    """Return True if autograd's engine calls, from its one Python function or from C++."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.endswith(_INTERMEDIATE_FILES):
        frame = frame.f_back
    called = frame is not None and frame.f_code.co_name in (
        "_engine_run_backward",
        "backward",
        "grad",
    )
    return called and frame.f_globals.get("__name__", "").startswith("torch.autograd")


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype is torch.bool


def _plain(tree: Any) -> Iterator[Any]:
    """Yield all tensors; for a wrapper, those inside."""
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
