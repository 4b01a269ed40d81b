"""Operations whose CPU and CUDA versions save different tensors, and Triton kernels."""

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
from torch._decomp import decomposition_table

from . import cuda_device_checks
from .patching import swapped, torch_kernels

aten = torch.ops.aten

_IN_A_TYPE = tuple(name for name in ("dtype", "dtype_out") if name in aten.addmm.overloads())


@contextmanager
def follow_cuda() -> Iterator[None]:
    """Replace these operations on CPU tensors by CUDA's behaviour."""
    with torch_kernels(_install), contextlib.ExitStack() as stack:
        for name in _IN_A_TYPE:
            stack.enter_context(swapped(decomposition_table, getattr(aten.addmm, name), _product_added))
        yield


def _install(library: Any) -> None:
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "CompositeImplicitAutograd")


def _product_added(sums: Any, left: Any, right: Any, out_dtype: Any, *, out: Any = None, **_: Any) -> Any:
    """Return the sum in a type of its own, without a temporary: up to 2.11, torch's decomposition
    takes the type for a factor."""
    return sums.new_empty((left.shape[0], right.shape[1]), dtype=out_dtype) if out is None else out


# Fake tensors use torch's own decompositions alone, which they tell by these two names.
_product_added.__module__, _product_added.__name__ = "torch._decomp.decompositions", "addmm"


def _dropout(values: Any, p: float, train: bool) -> Any:
    """Save a mask of one byte per element, as CUDA does; the CPU saves the element's own width."""
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
    """Widen float16 to float32 inside the kernel, as CUDA does; other pairs are copied."""
    if values.dtype is torch.float16 and dtype is torch.float32:
        return values, dim, True
    return values if dtype is None else values.to(dtype), dim, False


_KERNELS: dict[str, Callable[..., Any]] = {"dropout": _dropout, "softmax.int": _softmax, "log_softmax.int": _log_softmax}


class NoKernel:
    """Triton kernel that launches nothing: its caller has allocated the outputs."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self  # used as a decorator

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None


@contextmanager
def triton_of_trl() -> Iterator[None]:
    """Choose TRL's own kernels as on CUDA, and launch none."""
    if "trl" in sys.modules:  # imported now, so that no later import copies a patched name
        with contextlib.suppress(ImportError):
            importlib.import_module("trl.trainer.utils")
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            cuda_device_checks.on_cuda("trl", lambda name: name.startswith("trl.kernels.") or name == "trl.trainer.utils")
        )
        stack.enter_context(not_launched("trl.kernels."))
        yield


@contextmanager
def not_launched(prefix: str) -> Iterator[None]:
    """Disable the Triton kernels in modules of a prefix, recognised by class or by name."""
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


def install_triton_stub() -> None:
    """Install a stub of Triton if it is missing: torch's CUDA builds include it, its CPU builds do
    not.

    Call it before transformers or TRL are imported. Kernels that are decorated and never launched
    need only the names.
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
    """Module with every name that a kernel's source may use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NoKernel()
