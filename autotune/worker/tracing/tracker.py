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
from .workspaces import OperationCall, Workspace

aten = torch.ops.aten

VIEWS = frozenset(
    {
        "view",
        "transpose",
        "t",
        "expand",
        "detach",
        "unsqueeze",
        "_unsafe_view",
        "slice",
        "select",
        "squeeze",
        "permute",
        "alias",
        "split",
        "split_with_sizes",
        "as_strided",
        "unbind",
        "_reshape_alias",
        "lift_fresh",
        "chunk",
        "diagonal",
        "unfold",
        "view_as_real",
        "view_as_complex",
    }
)
"""Operations without a kernel."""

_PRODUCTS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
"""Operations of cuBLAS."""

_ACCUMULATING = frozenset({aten.add.Tensor, aten.scatter_add.default, aten.index_put.default})

_INDEXED_BY_MASKS = frozenset({aten.index.Tensor, aten.index_put_.default})

_QUERIES: dict[Any, Callable[[Any], Any]] = dict(
    getattr(fake_tensor, "_DISPATCH_META_HANDLERS", {})
)
"""Queries of a fake tensor, such as its device: more than half of all calls, and without effect."""

if torch.distributed.is_available():  # it returns its argument; its fake kernel makes a tensor
    _QUERIES[torch.ops._c10d_functional.wait_tensor.default] = lambda arguments: arguments[0]

_FAKE = (fake_tensor.FakeTensor,)


class _OperationInfo:
    """Properties of one operation, looked up once: a step has tens of thousands of calls."""

    __slots__ = (
        "accumulates",
        "by_values",
        "flops",
        "launches",
        "multiplies",
        "query",
        "takes_masks",
        "workspace",
        "written",
    )

    def __init__(self, func: Any, workspace: Workspace | None) -> None:
        packet = getattr(func, "_overloadpacket", None)
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema else ()
        name = str(packet).rsplit(".", 1)[-1]
        self.query = _QUERIES.get(func)
        self.by_values = integer_values.BY_VALUES.get(func)
        self.takes_masks = func in _INDEXED_BY_MASKS
        self.launches = name not in VIEWS and getattr(func, "namespace", "") != "prim"
        self.flops = flops_of(packet, arguments)
        self.written = _written_arguments(schema)
        self.accumulates = func in _ACCUMULATING
        self.multiplies = packet in _PRODUCTS
        self.workspace = workspace


def _written_arguments(schema: Any) -> tuple[int, ...]:
    """Return the positions of arguments that are changed in place and not returned: lists."""
    if schema is None or schema.returns:
        return ()
    positions = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            positions.append(position)
    return tuple(positions)


class _Entry:
    """A live storage in the ledger."""

    __slots__ = ("number", "ref", "size")

    def __init__(
        self,
        number: int,
        size: int,
        ref: Any,
    ) -> None:
        self.number = number
        self.size = size
        self.ref = ref


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
        """Last dimensions that identify logits."""
        self._device = device
        self._workspaces = dict(workspaces or {})
        self._operations: dict[int, _OperationInfo] = {}
        """Keys are ids: operations are never freed, and hashing one calls Python."""
        self._live: dict[int, _Entry] = {}
        """Keys are addresses of torch's storage objects (`_cdata`)."""
        self._donation: tuple[_Entry, int] | None = None
        """The entry of an operand that the latest result took, and the result's key in `_live`."""
        self._part: str | None = None
        self._mode: Any = None

    def __enter__(self) -> Tracker:
        self._mode = None
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, fake_tensor.FakeTensorMode):
                self._mode = mode
        return super().__enter__()  # type: ignore[no-any-return]

    # 1. Interface of the step's driver.

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """Record allocations as this part, whatever they look like."""
        outer_part = self._part
        self._part = part
        try:
            yield
        finally:
            self._part = outer_part

    @contextmanager
    def untracked(self) -> Iterator[None]:
        """Record nothing: for work that a plain run does not do."""
        was_paused = self.paused
        self.paused = True
        try:
            yield
        finally:
            self.paused = was_paused

    def set_part(self, tensors: Any, part: str) -> None:
        """Set the part of these tensors' storages."""
        for tensor in _plain_tensors(tensors):
            number = self.number_of(tensor)
            if number is not None:
                self.ledger.set_part(number, part)

    def set_workspace(self, operation: Any, workspace: Workspace) -> None:
        """Set the memory inside an operation's kernel, before its first call."""
        self._workspaces[operation] = workspace

    def number_of(self, tensor: Any) -> int | None:
        """Return the number of a tensor's allocation; None if it is not recorded."""
        entry = self._entry(tensor.untyped_storage())
        return None if entry is None else entry.number

    def record(self, tensor: Any) -> None:
        """Record a tensor that no operation made."""
        if not self.paused:
            self._record(tensor)

    def resized(self, storage: Any, size: int) -> None:
        """Record a storage resized in place, as sharded parameters are."""
        if self.paused:
            return
        if storage._cdata not in self._live and storage.device.type != self._device:
            return
        entry = self._entry(storage)
        if entry is None:
            if size:
                number = self.ledger.allocate(size, self._part or "communication")
                self._add(storage, number, size)
            return
        part_number = self.ledger.parts[entry.number]
        if entry.size:
            self.ledger.free(entry.number)
        entry.size = size
        if size:
            entry.number = self.ledger.allocate(size, "activations")
            self.ledger.parts[entry.number] = part_number

    # 2. Interface of torch.

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: skip torch's wrapper against compilation; nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if types != _FAKE and any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its local operations are dispatched separately
        info = self._operations.get(id(func))
        if info is None:
            info = _OperationInfo(func, self._workspaces.get(func))
            self._operations[id(func)] = info
        if info.query is not None:
            return info.query(args)

        # 1. Run the operation.
        kwargs = kwargs or {}
        if self._donation is not None:
            self._settle_donation()
        out, cached = self._run(info, func, args, kwargs)
        if self.paused:
            return out

        # 2. Count its work.
        if info.launches:
            costs = {} if cached is None else cached.costs
            if info.flops not in costs:
                costs[info.flops] = cost_of(info.flops, info.written, args, kwargs, out)
            self.ledger.count(*costs[info.flops])

        # 3. Record its memory.
        reuses_operand = info.accumulates and self._reuses_its_operand(func, args)
        if reuses_operand and self._record_in_place(args[0], out):
            return out
        for tensor in _plain_tensors(out):
            self._record(tensor)
        if info.multiplies:
            self.ledger.note_product()
        if info.workspace is not None:
            self._record_workspace(info.workspace(OperationCall(args, kwargs, out)))
        return out

    def _run(
        self,
        info: _OperationInfo,
        func: Any,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, CachedResult | None]:
        """Run the operation on fake tensors, with known values where the shape depends on data;
        return its cached form too.
        """
        if info.by_values is not None:
            return info.by_values(func, args, kwargs), None
        if info.takes_masks and any(map(integer_values.is_mask, args[1])):
            if func is aten.index_put_.default:
                return args[0], None
            args = (args[0], integer_values.without_masks(args[1]), *args[2:])
            out, _ = self._run_on_fakes(func, args, kwargs)
            integer_values.learn(func, args, kwargs, out)
            return out, None
        out, cached = self._run_on_fakes(func, args, kwargs)
        integer_values.learn(func, args, kwargs, out)
        return out, cached

    def _run_on_fakes(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, CachedResult | None]:
        # 1. By a rule, or from the cache.
        out = dispatch_cache.by_rule(func, args, kwargs, self._mode)
        if out is not None:
            return out, None
        key = dispatch_cache.key_of(func, args, kwargs)
        if key is not None:
            cached = dispatch_cache.find(key)
            if cached is not None:
                return cached.again(args, kwargs, self._mode), cached

        # 2. By torch.
        try:
            out = func(*args, **kwargs)
        except fake_tensor.UnsupportedFakeTensorException as error:
            raise Untraceable(f"{func} cannot be traced without data: {error}") from error
        except (
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.DataDependentOutputException,
        ) as error:
            out = integer_values.result_of(func, args, kwargs)
            if out is None:
                raise Untraceable(f"{func}: the result depends on data") from error
            return out, None
        if key is None:
            return out, None
        return out, dispatch_cache.note(key, func, args, kwargs, self._mode, out)

    # 3. Storages.

    def _record(self, tensor: Any) -> None:
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        entry = self._entry(storage)
        if entry is not None:
            if entry.size != size:
                self.resized(storage, size)
        elif size:
            part = self._part or self._part_of(tensor)
            self._add(storage, self.ledger.allocate(size, part), size)

    def _part_of(self, tensor: Any) -> str:
        if self.ledger.phase == "load":
            return "weights"
        if self.ledger.phase == "optimizer":
            return "workspaces"  # state that stays is corrected with `set_part`
        if tensor.dim() >= 2 and tensor.shape[-1] in self.vocabulary:
            return "logits"
        return "activations"

    def _entry(self, storage: Any) -> _Entry | None:
        entry = self._live.get(storage._cdata)
        if entry is None or entry.ref() is None:
            return None
        return entry

    def _add(
        self,
        storage: Any,
        number: int,
        size: int,
    ) -> None:
        key = storage._cdata

        def freed(ref: Any) -> None:
            entry = self._live.get(key)
            if entry is not None and entry.ref is ref:
                del self._live[key]
                if entry.size:
                    self.ledger.free(entry.number)

        self._live[key] = _Entry(number, size, weakref.ref(storage, freed))

    def _record_workspace(self, sizes: int | tuple[int, ...]) -> None:
        if isinstance(sizes, int):
            sizes = (sizes,)
        numbers = [self.ledger.allocate(size, "workspaces") for size in sizes if size > 0]
        for number in reversed(numbers):  # local tensors of a C++ function
            self.ledger.free(number)

    # 4. Out-of-place paths of a dispatch mode.

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

    def _record_in_place(self, operand: Any, out: Any) -> bool:
        """Record the result as its operand's allocation; undone if the operand is still live
        next.
        """
        storage = out.untyped_storage()
        operand_key = operand.untyped_storage()._cdata
        entry = self._live.get(operand_key)
        if entry is None or entry.size != storage.nbytes():
            return False
        if out.device.type != self._device or operand_key == storage._cdata:
            return False
        del self._live[operand_key]
        self._add(storage, entry.number, entry.size)
        self._donation = entry, storage._cdata
        return True

    def _settle_donation(self) -> None:
        assert self._donation is not None
        entry, result_key = self._donation
        self._donation = None
        operand_storage = entry.ref()
        if operand_storage is None:
            return
        self._add(operand_storage, entry.number, entry.size)
        if result_key in self._live:
            number = self.ledger.allocate(entry.size, self._part or "activations")
            self._live[result_key].number = number


_INTERMEDIATE_FILES = (__file__, "_compile.py", "eval_frame.py", "_python_dispatch.py")
"""Files on the stack between an operation and the tracker."""

_ENGINE_FUNCTIONS = ("_engine_run_backward", "backward", "grad")
"""Python functions of `torch.autograd` that run the engine, or that it runs from C++."""


def _called_by_engine() -> bool:
    """Return True if autograd's engine calls, from its one Python function or from C++."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.endswith(_INTERMEDIATE_FILES):
        frame = frame.f_back
    if frame is None or frame.f_code.co_name not in _ENGINE_FUNCTIONS:
        return False
    module = frame.f_globals.get("__name__", "")
    return bool(module.startswith("torch.autograd"))


def _plain_tensors(tree: Any) -> Iterator[Any]:
    """Yield all tensors; for a wrapper, those inside."""
    if type(tree) is fake_tensor.FakeTensor:
        yield tree
        return
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor):
            continue
        if is_traceable_wrapper_subclass(leaf):
            for name in leaf.__tensor_flatten__()[0]:
                yield from _plain_tensors(getattr(leaf, name))
        else:
            yield leaf
