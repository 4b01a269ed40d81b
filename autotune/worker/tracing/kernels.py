"""Operations whose CPU and CUDA versions save different tensors, and Triton kernels."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._decomp import decomposition_table

from . import cuda_device_checks
from .patching import all_entered, swapped, torch_kernels

aten = torch.ops.aten


@all_entered
def follow_cuda() -> Iterator[AbstractContextManager[None]]:
    """Replace these operations on CPU tensors by CUDA's behaviour."""

    def install(library: Any) -> None:
        for name, kernel in {"dropout": _dropout, "softmax.int": _softmax, "log_softmax.int": _log_softmax}.items():
            library.impl(name, kernel, "CompositeImplicitAutograd")

    yield torch_kernels(install)
    for name in ("dtype", "dtype_out"):
        if name in aten.addmm.overloads():
            yield swapped(decomposition_table, getattr(aten.addmm, name), _product_added)


def _product_added(sums: Any, left: Any, right: Any, out_dtype: Any, *, out: Any = None, **_: Any) -> Any:
    """Return the sum in a type of its own, without a temporary: up to 2.11, torch's decomposition takes it for a factor."""
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


class NoKernel:
    """Triton kernel that launches nothing: its caller has allocated the outputs."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self  # used as a decorator

    def run(self, *args: Any, **kwargs: Any) -> None:
        return None


@all_entered
def triton_of_trl() -> Iterator[AbstractContextManager[None]]:
    """Choose TRL's own kernels as on CUDA, and launch none."""
    if "trl" in sys.modules:  # imported now, so that no later import copies a patched name
        with suppress(ImportError):
            importlib.import_module("trl.trainer.utils")
    yield cuda_device_checks.on_cuda("trl", lambda name: name.startswith("trl.kernels.") or name == "trl.trainer.utils")
    yield not_launched("trl.kernels.")


@all_entered
def not_launched(prefix: str) -> Iterator[AbstractContextManager[None]]:
    """Disable the Triton kernels in modules of a prefix."""
    for names in [vars(sys.modules[name]) for name in sys.modules if name.startswith(prefix)]:
        for kernel, value in list(names.items()):
            if _is_kernel(kernel, value):
                yield swapped(names, kernel, NoKernel())
        if "triton" not in names:
            yield swapped(names, "triton", SimpleNamespace(cdiv=lambda a, b: -(-a // b)))


def _is_kernel(name: str, value: Any) -> bool:
    """Recognise a kernel by its class, or by its name and an argument."""
    if type(value).__module__.split(".")[0] == "triton" and hasattr(value, "__getitem__") and hasattr(value, "run"):
        return True
    if not name.endswith("_kernel") or not isinstance(value, FunctionType):
        return False
    return any("BLOCK" in argument for argument in value.__code__.co_varnames[: value.__code__.co_argcount])


def install_triton_stub() -> None:
    """Install a stub of Triton if it is missing, as with torch's CPU builds.

    Call it before transformers or TRL are imported. Kernels that are decorated and never launched need only the names.
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
