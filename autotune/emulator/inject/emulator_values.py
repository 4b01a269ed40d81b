"""True values for small tensors and for integers, on cards that compute nothing.

Emulated device memory is readable on the host. Every operator runs on the device first, where its
kernels do nothing and its allocations count. If its tensors are small, it then runs once more on
CPU tensors over the same memory. Results that were not computed are zeroed: torch's cache hands out
blocks with the bytes of former tensors, and an old id read as a number may be infinite.

Integers and booleans (ids, masks, lengths) decide the code path, so they are computed up to a far
larger size; larger ones are recorded, and the run reports them at its end.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

memory = importlib.import_module("emulator_memory")  # Python's path has this folder

MOST_INTEGERS = int(os.environ.get("AUTOTUNE_EMULATOR_INTEGERS", 1 << 22))
"""Elements, inputs and results together, up to which an operator is computed whose inputs are all
integers or booleans; with others, `emulator_memory.MOST_FLOATS`.
"""

MOST_FOR_SHAPES = 1 << 26
"""The same where the shape of a result depends on values."""

MOST_ZEROED_ON_THE_HOST = 1 << 24
LEAST_GIVEN_BACK = 1 << 20
"""Bytes from which a new result on the host is zeroed without writing to it."""

aten = torch.ops.aten
COLLECTIVES = {"c10d", "_c10d_functional"}
"""Namespaces whose payloads the emulated NCCL carries by itself."""

ON_THE_CPU_TOO = {"aten", "prims"}
_BY_VALUE = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten._unique.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
    aten.masked_scatter_backward.default,
}
"""The shape of their result depends on values, or they select inside one kernel."""

_COMPARISONS = (aten.equal.default, aten.is_nonzero.default)

_NO_VALUES = ("empty", "new_empty", "record_stream", "resize", "set")
"""Prefixes of operators that compute nothing: they concern a tensor's place."""

_ACCUMULATED = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.index_put.default: aten.index_put_.default,
}
"""Operators that autograd's engine calls in place of the second while any dispatch mode is on:
it then needs memory that a plain run does not.
"""

_FRAMES = (__file__, "_compile.py", "eval_frame.py", "_python_dispatch.py", "_stats.py")
"""Files on the stack between an operator and this mode."""

_reported: set[str] = set()
_random = torch.Generator()
_random.manual_seed(0)


# 1. The mode.


class _Facts:
    """Facts about an operator."""

    def __init__(self, function: Any) -> None:
        schema = function._schema
        alias_infos = [result.alias_info for result in schema.returns]
        self.name = schema.name.split("::")[1].rstrip("_").lstrip("_")
        self.is_view = any(info is not None and not info.is_write for info in alias_infos)
        self.writes = schema.is_mutable
        self.leaves_memory = self.name.startswith(_NO_VALUES)
        self.zeroes = self.name.startswith(("zero", "new_zeros"))
        self.can_be_taken_apart = torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), "CompositeImplicitAutograd"
        )


class TrueValues(TorchDispatchMode):  # type: ignore[misc]
    """Computes what is small once more on the CPU."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        # 1. Tensors that are none of a card's. Fake ones have no memory: torch propagates shapes,
        # for instance while it compiles.
        fake_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if fake_mode is not None or any(issubclass(kind, FakeTensor) for kind in types):
            return function(*args, **kwargs)
        if any(_has_own_dispatch(kind) for kind in types):
            return NotImplemented

        # 2. Operators that are not computed again.
        if function in _ACCUMULATED and _overwrites(function, args):
            function = _ACCUMULATED[function]
        facts = _facts_of(function)
        if facts.is_view and facts.can_be_taken_apart and any(map(memory.is_on_card, args)):
            # Under inference mode, `to`, `contiguous` and `reshape` arrive whole, and may copy:
            # their parts are to come by.
            with self:
                return function.decompose(*args, **kwargs)
        if facts.is_view or function.namespace in COLLECTIVES:
            return function(*args, **kwargs)
        if memory.pins(function, kwargs):
            return memory.pinned(function, args, kwargs)

        # 3. Those that are, on a card.
        call = _Call(function, facts, args, kwargs)
        return call.answer() if call.is_on_card else function(*args, **kwargs)


_facts_of = functools.cache(_Facts)


def _has_own_dispatch(kind: type) -> bool:
    """Return True for a tensor type with its own dispatch; a DTensor's local parts are
    dispatched again.
    """
    if kind in (torch.Tensor, torch.nn.Parameter):
        return False
    return getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__


def _overwrites(function: Any, args: Any) -> bool:
    """Return True where autograd's engine would write into the first operand if no mode was on.

    For a sum that takes the last reference to it: a storage has one from the tensor and one from
    here.
    """
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    first = args[0]
    if not memory.is_on_card(first):
        return False
    if function is aten.add.Tensor:
        if not _is_alike(first, args[1]) or not first.is_contiguous():
            return False
        if torch._C._storage_Use_Count(first.untyped_storage()._cdata) > 2:
            return False
    return _called_by_engine()


def _is_alike(tensor: torch.Tensor, value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return bool(value.shape == tensor.shape and value.dtype == tensor.dtype)


def _called_by_engine() -> bool:
    """Return True without Python code below: in a thread of the engine, or in its one function."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.endswith(_FRAMES):
        frame = frame.f_back
    if frame is None:
        return True
    if frame.f_code.co_name not in ("_engine_run_backward", "backward", "grad"):
        return False
    module = frame.f_globals.get("__name__", "")
    return bool(module.startswith("torch.autograd"))


# 2. One call.


class _Call:
    """Operator with its arguments."""

    def __init__(
        self,
        function: Any,
        facts: _Facts,
        args: Any,
        kwargs: Any,
    ) -> None:
        self.function = function
        self.facts = facts
        self.args = args
        self.kwargs = kwargs
        self._flatten()

    def _flatten(self) -> None:
        self.values, self.structure = tree_flatten((self.args, self.kwargs))
        tensors = [value for value in self.values if isinstance(value, torch.Tensor)]
        self.elements = sum(tensor.numel() for tensor in tensors)
        self.on_card = [tensor for tensor in tensors if tensor.device.type == "cuda"]
        self.device = self._device()
        self.is_on_card = self.device is not None

    def _device(self) -> Any:
        """Return the card of the first tensor, else the one that the operator is to allocate on."""
        if self.on_card:
            return self.on_card[0].device
        for value in self.values:
            if isinstance(value, torch.device) and value.type == "cuda":
                return value
        return None

    def answer(self) -> Any:
        if self.function is aten._local_scalar_dense.default:
            return self.function(memory.alias(self.args[0]))
        shapes_can_be_computed = self.elements <= MOST_FOR_SHAPES
        if self.function in _COMPARISONS:
            return self._computed() if shapes_can_be_computed else True
        if self.function in _BY_VALUE and shapes_can_be_computed:
            return self._put(self._computed())
        if self.facts.name == "multinomial":
            return self._sampled()
        if self.facts.name in ("index", "index_put", "index_put_impl"):
            self._replace_masks()
        return self._run()

    def _computed(self) -> Any:
        """Return the result of the same on the CPU, over the device's memory."""
        values = [_on_cpu(value) for value in self.values]
        args, kwargs = tree_unflatten(values, self.structure)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if self.function is aten.log_sigmoid_backward.default:
            # The CPU reads exp(-|x|), which CUDA does not save.
            args = (*args[:2], torch.exp(-args[1].abs()))
        return self.function(*args, **kwargs)

    def _put(self, value: Any) -> Any:
        """Copy the computed result into the device's tensors."""
        if isinstance(value, (tuple, list)):
            return tuple(self._put(item) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        on_card = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        if on_card.numel():
            memory.alias(on_card).copy_(value)
        return on_card

    def _sampled(self) -> Any:
        """Draw ids with a fixed generator, the same in every run, since probabilities were never
        computed.

        None of them is special: special ids are at the end of a vocabulary.
        """
        probabilities = self.args[0]
        count = self.args[1]
        *rows, vocabulary = probabilities.shape
        torch.empty_like(probabilities)  # the kernel's own: the distribution in exponential noise
        first = min(5, vocabulary - 1)
        end = max(first + 1, vocabulary // 2)
        return self._put(torch.randint(first, end, (*rows, count), generator=_random))

    def _replace_masks(self) -> None:
        """Take masks among the indices for the positions that are true in them, which is what
        the kernel does first.
        """
        indices: list[Any] = []
        for index in self.args[1] or []:
            if _is_mask(index):
                positions = torch.nonzero(memory.alias(index), as_tuple=True)
                indices += [self._put(position) for position in positions]
            else:
                indices.append(index)
        if any(map(_is_mask, self.args[1] or [])):
            self.args = (self.args[0], indices, *self.args[2:])
            self._flatten()

    def _run(self) -> Any:
        """Run the operator on the card, then fill its results."""
        result = self.function(*self.args, **self.kwargs)
        results = _tensors(result)
        if self._is_small(results):
            try:
                self._fill(results)
                return result
            except Exception as error:
                _write_down("failed", f"{self.function}: {str(error)[:200]}")
        elif self._was_exact(results):
            elements = self.elements + sum(result.numel() for result in results)
            _write_down("skipped", f"{self.function} of {elements} elements")
        if not self.facts.writes or self.facts.zeroes:
            self._zero(results)
        return result

    def _fill(self, results: list[torch.Tensor]) -> None:
        """Compute on the CPU. An operator that writes has then written into the very memory."""
        values = _tensors(self._computed())
        if self.facts.writes:
            return
        for result, value in zip(results, values):  # noqa: B905
            if result.shape == value.shape:
                target = memory.alias(result) if memory.is_on_card(result) else result
                target.copy_(value)

    def _is_small(self, results: list[torch.Tensor]) -> bool:
        if self.function.namespace not in ON_THE_CPU_TOO or self.facts.leaves_memory:
            return False
        elements = self.elements
        if not self.facts.writes:
            elements += sum(result.numel() for result in results)
        limit = MOST_INTEGERS if self._is_exact(results) else memory.MOST_FLOATS
        return bool(elements <= limit)

    def _was_exact(self, results: list[torch.Tensor]) -> bool:
        """Return True if skipping the operator loses true values: floating-point inputs had
        none.
        """
        if self.facts.leaves_memory or self.facts.zeroes:
            return False
        return bool(self.on_card or results) and self._is_exact(results)

    def _is_exact(self, results: list[torch.Tensor]) -> bool:
        """Return True if all tensors are integers or booleans."""
        for tensor in (*self.on_card, *results):
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                return False
        return True

    def _zero(self, results: list[torch.Tensor]) -> None:
        for result in results:
            if memory.is_on_card(result):
                memory.zero_on_card(result)
            elif result.device.type == "cpu":  # "meta" has no memory
                self._zero_on_host(result)

    def _zero_on_host(self, result: torch.Tensor) -> None:
        if not self.facts.writes and result.nbytes >= LEAST_GIVEN_BACK:
            memory.give_back(result)
        elif result.numel() <= MOST_ZEROED_ON_THE_HOST:
            result.zero_()


def _tensors(value: Any) -> list[torch.Tensor]:
    items = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def _is_mask(index: Any) -> bool:
    return memory.is_on_card(index) and index.dtype in (torch.bool, torch.uint8)


# 3. Operands, and reports.


def _on_cpu(value: Any) -> Any:
    """Return the representation of an operand on the CPU."""
    if isinstance(value, torch.Tensor):
        return memory.alias(value) if value.device.type == "cuda" else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return None
    return value


def _write_down(kind: str, text: str) -> None:
    """Record each operator and size once, immediately: a rank may exit at any time."""
    operator = text.split(" of ")[0]
    folder = os.environ.get("AUTOTUNE_EMULATOR_REPORT")
    if folder is None or operator in _reported:
        return
    _reported.add(operator)
    with open(Path(folder) / f"{os.getpid()}.values", "a") as file:  # noqa: PTH123
        file.write(f"{kind}\t{text}\n".replace("\n", " ").rstrip() + "\n")
