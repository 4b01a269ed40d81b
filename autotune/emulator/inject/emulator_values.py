"""True values for small tensors and for integers, on cards that compute nothing.

Emulated device memory is readable on the host. Every operator runs on the device first, where its
kernels do nothing and its allocations count. If its tensors are small, it then runs once more on
CPU tensors over the same memory. Results that were not computed are zeroed: torch's cache hands out
blocks with the bytes of former tensors, and an old id read as a number may be infinite.

Integers and booleans (ids, masks, lengths) decide the code path, so they are computed up to a far
larger size; larger ones are recorded, and the run reports them at its end.

Pinned memory of the host stays untouched until something is written to it: offloaded optimizers and
vLLM's swap space are gigabytes per process, in tensors that are zero or were never written. torch
would write each of their pages; here such pages take no memory. Small tensors are left to torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

MOST_FLOATS = int(os.environ.get("AUTOTUNE_EMULATOR_FLOATS", 1 << 14))
"""Elements, inputs and results together, up to which an operator with floating-point inputs is
computed.
"""

MOST_INTEGERS = int(
    os.environ.get("AUTOTUNE_EMULATOR_INTEGERS", 1 << 22)
)  # the same where all inputs are integers or booleans
MOST_FOR_SHAPES = 1 << 26  # the same where the shape of a result depends on values
MOST_ZEROED_ON_THE_HOST = 1 << 24
LEAST_GIVEN_BACK = (
    1 << 20
)  # bytes from which a new result on the host is zeroed without writing to it
MOST_ALIASES = 20_000
MOST_PINNED_AND_WRITTEN = 1 << 20  # bytes up to which a pinned tensor is written as usual

aten = torch.ops.aten
COLLECTIVES = {
    "c10d",
    "_c10d_functional",
}  # namespaces whose payloads the emulated NCCL carries by itself
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

_PINS = {
    getattr(aten, name).default for name in ("_pin_memory", "pin_memory") if hasattr(aten, name)
}
_ZEROS = {
    aten.zeros.default: aten.empty.memory_format,
    aten.zeros_like.default: aten.empty_like.default,
}
"""Operators whose result may be pinned and whole at once, with those that allocate alone."""

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

_aliases: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}
_facts: dict[Any, _Facts] = {}
_reported: set[str] = set()
_sampled = torch.Generator()
_sampled.manual_seed(0)


class _Facts:
    """Cached facts about an operator."""

    def __init__(self, function: Any) -> None:
        schema = function._schema
        returned = [result.alias_info for result in schema.returns]
        self.name = schema.name.split("::")[1].rstrip("_").lstrip("_")
        self.is_view = any(info is not None and not info.is_write for info in returned)
        self.writes = schema.is_mutable
        self.leaves_memory = self.name.startswith(_NO_VALUES)
        self.zeroes = self.name.startswith(("zero", "new_zeros"))
        self.can_be_taken_apart = torch._C._dispatch_has_kernel_for_dispatch_key(
            function.name(), "CompositeImplicitAutograd"
        )


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor over the same memory."""
    storage = tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if not address or not size:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    key = (address, size, tensor.dtype)
    whole = _aliases.get(key)
    if whole is None:
        if len(_aliases) >= MOST_ALIASES:
            _aliases.clear()
        usable = size - size % tensor.dtype.itemsize
        whole = torch.frombuffer((ctypes.c_char * usable).from_address(address), dtype=tensor.dtype)
        _aliases[key] = whole
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _is_on_card(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "cuda"


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return alias(value) if value.device.type == "cuda" else value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return None if isinstance(value, torch.Generator) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    return [
        one
        for one in (value if isinstance(value, (tuple, list)) else [value])
        if isinstance(one, torch.Tensor)
    ]


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _of_another_kind(kind: type) -> bool:
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
    if (
        torch._C._current_graph_task_id() == -1
        or torch.is_grad_enabled()
        or not _is_on_card(args[0])
    ):
        return False
    first = args[0]
    if function is aten.add.Tensor:
        second = args[1]
        alike = (
            isinstance(second, torch.Tensor)
            and second.shape == first.shape
            and second.dtype == first.dtype
        )
        if (
            not alike
            or not first.is_contiguous()
            or torch._C._storage_Use_Count(first.untyped_storage()._cdata) > 2
        ):
            return False
    return _called_by_engine()


def _called_by_engine() -> bool:
    """Return True without Python code below: in a thread of the engine, or in its one function."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code.co_filename.endswith(_FRAMES):
        frame = frame.f_back
    if frame is None:
        return True
    inside = frame.f_globals.get("__name__", "").startswith("torch.autograd")
    return inside and frame.f_code.co_name in ("_engine_run_backward", "backward", "grad")


class TrueValues(TorchDispatchMode):  # type: ignore[misc]
    """Computes what is small once more on the CPU."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # No argument has memory: torch propagates shapes, for instance while it compiles.
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if fake or any(issubclass(kind, FakeTensor) for kind in types):
            return function(*args, **kwargs)
        if any(_of_another_kind(kind) for kind in types):
            return NotImplemented
        if function in _ACCUMULATED and _overwrites(function, args):
            function = _ACCUMULATED[function]
        facts = _facts.get(function) or _facts.setdefault(function, _Facts(function))
        if facts.is_view and facts.can_be_taken_apart and any(_is_on_card(value) for value in args):
            # Under inference mode, `to`, `contiguous` and `reshape` arrive whole, and may copy:
            # their parts are to come by.
            with self:
                return function.decompose(*args, **kwargs)
        if facts.is_view or function.namespace in COLLECTIVES:
            return function(*args, **kwargs)
        if function in _PINS or (function in _ZEROS and kwargs.get("pin_memory")):
            return _pinned(function, args, kwargs)
        call = _Call(function, facts, args, kwargs)
        return call.answer() if call.is_on_card else function(*args, **kwargs)


class _Call:
    """Operator with its arguments."""

    def __init__(self, function: Any, facts: _Facts, args: Any, kwargs: Any) -> None:
        self.function, self.facts, self.args, self.kwargs = function, facts, args, kwargs
        self._flatten()
        devices = [
            value for value in self.flat if isinstance(value, torch.device) and value.type == "cuda"
        ]
        self.is_on_card = bool(self.on_card or devices)
        self.device = self.on_card[0].device if self.on_card else devices[0] if devices else None

    def _flatten(self) -> None:
        self.flat, self.structure = tree_flatten((self.args, self.kwargs))
        self.on_card = [value for value in self.flat if _is_on_card(value)]
        self.elements = sum(value.numel() for value in self.flat if isinstance(value, torch.Tensor))

    def answer(self) -> Any:
        if self.function is aten._local_scalar_dense.default:
            return self.function(alias(self.args[0]))
        if self.function in (aten.equal.default, aten.is_nonzero.default):
            return self._computed() if self.elements <= MOST_FOR_SHAPES else True
        if self.function in _BY_VALUE and self.elements <= MOST_FOR_SHAPES:
            return self._put(self._computed())
        if self.facts.name == "multinomial":
            return self._sampled()
        if self.facts.name in ("index", "index_put", "index_put_impl"):
            self._by_positions()
        return self._run()

    def _computed(self) -> Any:
        """The same on the CPU, over the device's memory."""
        args, kwargs = tree_unflatten([_on_cpu(value) for value in self.flat], self.structure)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if (
            self.function is aten.log_sigmoid_backward.default
        ):  # the CPU reads exp(-|x|), which CUDA does not save
            args = (*args[:2], torch.exp(-args[1].abs()))
        return self.function(*args, **kwargs)

    def _put(self, value: Any) -> Any:
        """Copy the computed result into the device's tensors."""
        if isinstance(value, (tuple, list)):
            return tuple(self._put(one) for one in value)
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty(value.shape, dtype=value.dtype, device=self.device)
        if made.numel():
            alias(made).copy_(value)
        return made

    def _sampled(self) -> Any:
        """Draw ids with a fixed generator, the same in every run, since probabilities were never
        computed.

        None of them is special: special ids are at the end of a vocabulary.
        """
        probabilities, count = self.args[0], self.args[1]
        shape = (*probabilities.shape[:-1], count)
        torch.empty_like(probabilities)  # the kernel's own: the distribution in exponential noise
        least = min(5, probabilities.shape[-1] - 1)
        return self._put(
            torch.randint(
                least, max(least + 1, probabilities.shape[-1] // 2), shape, generator=_sampled
            )
        )

    def _by_positions(self) -> None:
        """Take masks among the indices for the positions that are true in them, which is what
        the kernel does first.
        """
        masks = [
            value
            for value in self.args[1] or []
            if _is_on_card(value) and value.dtype in (torch.bool, torch.uint8)
        ]
        if not masks:
            return
        indices: list[Any] = []
        for value in self.args[1]:
            if any(value is mask for mask in masks):
                indices += [
                    self._put(positions) for positions in torch.nonzero(alias(value), as_tuple=True)
                ]
            else:
                indices.append(value)
        self.args = (self.args[0], indices, *self.args[2:])
        self._flatten()

    def _run(self) -> Any:
        result = self.function(*self.args, **self.kwargs)
        results = _tensors(result)
        if self._is_small(results):
            try:
                values = _tensors(self._computed())
                for made, value in zip(results, values):  # noqa: B905
                    if (
                        not self.facts.writes and made.shape == value.shape
                    ):  # else it wrote into the very memory
                        (alias(made) if _is_on_card(made) else made).copy_(value)
                return result
            except Exception as error:
                _write_down("failed", f"{self.function}: {str(error)[:200]}")
        elif self._was_exact(results):
            elements = self.elements + sum(result.numel() for result in results)
            _write_down("skipped", f"{self.function} of {elements} elements")
        if not self.facts.writes or self.facts.zeroes:
            self._zero(results)
        return result

    def _is_small(self, results: list[torch.Tensor]) -> bool:
        if self.function.namespace not in ON_THE_CPU_TOO or self.facts.leaves_memory:
            return False
        produced = 0 if self.facts.writes else sum(one.numel() for one in results)
        most = (
            MOST_INTEGERS
            if all(_is_exact(one) for one in [*self.on_card, *results])
            else MOST_FLOATS
        )
        return bool(self.elements + produced <= most)

    def _was_exact(self, results: list[torch.Tensor]) -> bool:
        """Return True if skipping the operator loses true values: floating-point inputs had
        none.
        """
        tensors = [*self.on_card, *results]
        return (
            bool(tensors)
            and not (self.facts.leaves_memory or self.facts.zeroes)
            and all(_is_exact(one) for one in tensors)
        )

    def _zero(self, results: list[torch.Tensor]) -> None:
        for result in results:
            if _is_on_card(result):
                if (
                    result.is_contiguous()
                ):  # whole pages are given back to the host instead of being written
                    _library().cudaMemset(
                        result.data_ptr(), 0, result.numel() * result.element_size()
                    )
                elif result.numel() <= MOST_FLOATS:
                    alias(result).zero_()
            elif result.device.type != "cpu":  # "meta" has no memory
                continue
            elif (
                not self.facts.writes and result.nbytes >= LEAST_GIVEN_BACK
            ):  # its memory is new, from torch's allocator
                storage = result.untyped_storage()
                _library().emu_give_back(storage.data_ptr(), storage.nbytes())
            elif result.numel() <= MOST_ZEROED_ON_THE_HOST:
                result.zero_()


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    """Return the emulator's library, which is preloaded."""
    loaded = ctypes.CDLL(None)
    loaded.cudaMemset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    loaded.emu_copy_written.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    loaded.emu_give_back.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return loaded


def _pinned(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the pinned result of one of `_PINS` or `_ZEROS`, with the pages that hold
    something.
    """
    if function not in _PINS:
        made = _ZEROS[function](*args, **kwargs)
        return _emptied(made) if made.nbytes > MOST_PINNED_AND_WRITTEN else made.zero_()
    source = args[0]
    is_plain = (
        source.device.type == "cpu" and source.layout == torch.strided and source.is_contiguous()
    )
    if not is_plain or source.nbytes <= MOST_PINNED_AND_WRITTEN:
        return function(*args, **kwargs)
    made = _emptied(torch.empty(source.shape, dtype=source.dtype, pin_memory=True))
    _library().emu_copy_written(made.data_ptr(), source.data_ptr(), source.nbytes)
    return made


def _emptied(tensor: Any) -> Any:
    """Give the tensor's pages back to the host: they read as zeros. A cached block has bytes of
    its former tensor.
    """
    _library().cudaMemset(tensor.data_ptr(), 0, tensor.nbytes)
    return tensor


def _write_down(kind: str, what: str) -> None:
    """Record each operator and size once, immediately: a rank may exit at any time."""
    operator = what.split(" of ")[0]
    folder = os.environ.get("AUTOTUNE_EMULATOR_REPORT")
    if folder is None or operator in _reported:
        return
    _reported.add(operator)
    with open(Path(folder) / f"{os.getpid()}.values", "a") as file:  # noqa: PTH123
        file.write(f"{kind}\t{what}\n".replace("\n", " ").rstrip() + "\n")


def print_what_is_there() -> None:
    """Printing leaves dispatch modes and reads every element through kernels; DeepSpeed prints
    tensors in passing.
    """
    import torch._tensor_str as printing

    original = printing._str

    def shown(tensor: Any, **options: Any) -> str:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cuda":
            return str(original(tensor, **options))
        if tensor.numel() > MOST_FLOATS:
            return (
                f"tensor(..., device='{tensor.device}', size={tuple(tensor.shape)},"
                f" dtype={tensor.dtype})"
            )
        text = str(original(alias(tensor.detach()), **options))
        return f"{text[:-1]}, device='{tensor.device}')" if text.endswith(")") else text

    printing._str = shown
