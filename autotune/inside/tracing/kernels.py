"""Operations whose CPU and CUDA versions keep different tensors, beside autocast and attention; and Triton kernels."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from . import believing
from .swap import swapped, torch_kernels

aten = torch.ops.aten


@contextmanager
def follow_cuda() -> Iterator[None]:
    """Meanwhile these operations on CPU tensors do what they do on CUDA's."""
    with torch_kernels(_install):
        yield


def _install(library: Any) -> None:
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "CompositeImplicitAutograd")


def _dropout(values: Any, p: float, train: bool) -> Any:
    """CUDA keeps a mask of one byte per number; the CPU one of the numbers' own width."""
    if not train or p == 0 or values.numel() == 0:
        return values
    if p == 1:
        return values.mul(torch.zeros((), dtype=values.dtype, device=values.device))
    return aten.native_dropout(values, p, train)[0]


def _softmax(values: Any, dim: int, dtype: Any = None) -> Any:
    return aten._softmax(*_widened(values, dtype, dim))


def _log_softmax(values: Any, dim: int, dtype: Any = None) -> Any:
    return aten._log_softmax(*_widened(values, dtype, dim))


def _widened(values: Any, dtype: Any, dim: int) -> tuple[Any, int, bool]:
    """CUDA widens float16 to float32 inside the kernel; every other pair is copied first."""
    if values.dtype is torch.float16 and dtype is torch.float32:
        return values, dim, True
    return values if dtype is None else values.to(dtype), dim, False


_KERNELS: dict[str, Callable[..., Any]] = {"dropout": _dropout, "softmax.int": _softmax, "log_softmax.int": _log_softmax}


class NoKernel:
    """A Triton kernel that is launched and does nothing: its caller has already allocated what it writes."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self  # what decorates a kernel gives one

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None


@contextmanager
def triton_of_trl() -> Iterator[None]:
    """Meanwhile TRL's own kernels are chosen as on CUDA, and launch nothing. A TRL without such kernels is left as it is."""
    if "trl" in sys.modules:  # all that is changed is there before, so that nothing else takes the change along
        with contextlib.suppress(ImportError):
            importlib.import_module("trl.trainer.utils")
    with contextlib.ExitStack() as stack:
        stack.enter_context(believing.on_cuda("trl", lambda name: name.startswith("trl.kernels.") or name == "trl.trainer.utils"))
        stack.enter_context(not_launched("trl.kernels."))
        yield


@contextmanager
def not_launched(prefix: str) -> Iterator[None]:
    """Meanwhile the Triton kernels in modules of this prefix do nothing; they are known by their class, or by their name."""
    with contextlib.ExitStack() as stack:
        for name in [name for name in sys.modules if name.startswith(prefix)]:
            names = vars(sys.modules[name])
            for kernel, value in list(names.items()):
                if _is_kernel(value) or (
                    kernel.endswith("_kernel") and isinstance(value, FunctionType) and "BLOCK" in _arguments(value)
                ):
                    stack.enter_context(swapped(names, kernel, NoKernel()))
            if "triton" not in names:
                stack.enter_context(swapped(names, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b))))
        yield


def _is_kernel(value: Any) -> bool:
    return type(value).__module__.split(".")[0] == "triton" and hasattr(value, "__getitem__") and hasattr(value, "run")


def _arguments(function: FunctionType) -> str:
    return " ".join(function.__code__.co_varnames[: function.__code__.co_argcount])


def stand_in_for_triton() -> None:
    """Call it before transformers or TRL are imported: torch's builds for CUDA bring Triton, its builds for CPUs don't.

    Kernels that are only decorated, never launched, need no more than the names.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    triton, language = _Names("triton"), _Names("triton.language")
    for module in (triton, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        sys.modules[module.__name__] = module
    vars(triton).update(
        language=language,
        __version__="3.0.0",
        jit=lambda kernel=None, **options: NoKernel() if kernel is not None else (lambda kernel: NoKernel()),
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )


class _Names(ModuleType):
    """Every name that a kernel's text may use, without meaning."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NoKernel()
