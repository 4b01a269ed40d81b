"""Functions and kernels that choose by the device of a tensor: as on CUDA, on CPU tensors, with
nothing launched.

Some operations save other tensors on a CPU than on CUDA; they are replaced. A check such as
`tensor.device.type == "cuda"` in the middle of a function cannot be changed from outside. So the
function is compiled again from its source, with these comparisons replaced by their result on CUDA;
the rest is unchanged. Triton kernels launch nothing.

The installed liger-kernel runs unchanged: its functions allocate the outputs of their kernels,
chunk by chunk. Its preference losses are compiled if torch can. Fake tensors cannot be compiled:
the same functions run operation by operation, with more temporaries inside a chunk. `LIGER_NOTE`
reports this.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._decomp import decomposition_table

from . import Untraceable
from .patching import all_entered, attribute, swapped, torch_kernels

aten = torch.ops.aten

LIGER_NOTE = (
    "liger's chunked loss is traced uncompiled: inside one chunk a GPU may keep fewer temporaries"
)


# Operations.


@all_entered
def operations_as_on_cuda() -> Iterator[AbstractContextManager[None]]:
    """Replace these operations on CPU tensors by CUDA's behaviour."""

    def install(library: Any) -> None:
        library.impl("dropout", _dropout, "CompositeImplicitAutograd")
        for name in ("softmax", "log_softmax"):
            kernel = functools.partial(_softmax, getattr(aten, f"_{name}"))
            library.impl(f"{name}.int", kernel, "CompositeImplicitAutograd")

    yield torch_kernels(install)
    for name in ("dtype", "dtype_out"):
        if name in aten.addmm.overloads():
            yield swapped(decomposition_table, getattr(aten.addmm, name), _product_added)


def _product_added(
    sums: Any, left: Any, right: Any, out_dtype: Any, *, out: Any = None, **_: Any
) -> Any:
    """Return the sum in a type of its own, without a temporary: up to 2.11, torch's
    decomposition takes it for a factor.
    """
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


def _softmax(operation: Any, values: Any, dim: int, dtype: Any = None) -> Any:
    """Widen float16 to float32 inside the kernel, as CUDA does; other pairs are copied."""
    if values.dtype is torch.float16 and dtype is torch.float32:
        return operation(values, dim, True)
    return operation(values if dtype is None else values.to(dtype), dim, False)


# Checks of the device.


@all_entered
def checks_as_on_cuda(
    package: str, where: Callable[[str], bool]
) -> Iterator[AbstractContextManager[None]]:
    """Let the functions of a package's modules, selected by `where`, choose as on CUDA.

    A function is replaced in every module of the package that has imported it.
    """
    modules = {
        name: module for name, module in list(sys.modules.items()) if name.split(".")[0] == package
    }
    patched = {
        id(found): changed
        for name, module in modules.items()
        if where(name)
        for found in list(vars(module).values())
        if isinstance(found, FunctionType)
        and found.__module__ == name
        and (changed := recompiled(found)) is not None
    }
    for module in modules.values():
        for name, value in list(vars(module).items()):
            if id(value) in patched:
                yield swapped(vars(module), name, patched[id(value)])


@all_entered
def attention_on_cuda() -> Iterator[AbstractContextManager[None]]:
    """Let models' methods that call torch's attention choose as on CUDA: some copy inputs."""
    for name, module in list(sys.modules.items()):
        if not (name.startswith("transformers.models.") and ".modeling_" in name):
            continue
        for kind in [
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == name
        ]:
            for method, function in list(vars(kind).items()):
                if (
                    isinstance(function, FunctionType)
                    and "scaled_dot_product_attention" in function.__code__.co_names
                ):
                    changed = recompiled(function)
                    if changed is not None:
                        yield attribute(kind, method, changed)


@functools.cache
def recompiled(function: FunctionType) -> Any:
    """Return the function with its CUDA checks answered; None if it has none."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None
    checks = _CudaChecks()
    tree = ast.fix_missing_locations(checks.visit(tree))
    definition = tree.body[0]
    if not checks.count or not isinstance(definition, ast.FunctionDef) or function.__closure__:
        return None
    definition.decorator_list = []
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    future = ast.parse("from __future__ import annotations").body
    names: dict[str, Any] = {}
    exec(
        compile(ast.Module([*future, definition], []), inspect.getfile(function), "exec"),
        function.__globals__,
        names,
    )
    made = names[function.__name__]
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


class _CudaChecks(ast.NodeTransformer):
    """Replaces `x.type == "cuda"`, `x.type in ("cuda", ...)`, `x.is_cuda`, and their opposites."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        if len(node.ops) != 1 or not (
            isinstance(node.left, ast.Attribute) and node.left.attr == "type"
        ):
            return node
        right = node.comparators[0]
        constants = [part.value for part in ast.walk(right) if isinstance(part, ast.Constant)]
        if "cuda" not in constants:
            return node
        self.count += 1
        return ast.Constant(isinstance(node.ops[0], (ast.Eq, ast.In)))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        self.generic_visit(node)
        if node.attr != "is_cuda" or not isinstance(node.ctx, ast.Load):
            return node
        self.count += 1
        return ast.Constant(True)


# Triton.


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
    yield checks_as_on_cuda(
        "trl", lambda name: name.startswith("trl.kernels.") or name == "trl.trainer.utils"
    )
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
    if (
        type(value).__module__.split(".")[0] == "triton"
        and hasattr(value, "__getitem__")
        and hasattr(value, "run")
    ):
        return True
    if not name.endswith("_kernel") or not isinstance(value, FunctionType):
        return False
    return any(
        "BLOCK" in argument for argument in value.__code__.co_varnames[: value.__code__.co_argcount]
    )


def install_triton_stub() -> None:
    """Install a stub of Triton if it is missing, as with torch's CPU builds.

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
        jit=lambda kernel=None, **options: (
            NoKernel() if kernel is not None else (lambda kernel: NoKernel())
        ),
        cdiv=lambda a, b: -(-a // b),
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )


class _Names(ModuleType):
    """Module with every name that a kernel's source may use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NoKernel()


# Liger.


def _wants_liger(settings: Mapping[str, Any]) -> bool:
    return bool(settings.get("use_liger_kernel") or settings.get("use_liger_loss"))


def liger_notes(spec: Mapping[str, Any]) -> list[str]:
    """Return the deviations of a trace of this specification."""
    return (
        [LIGER_NOTE]
        if _wants_liger(spec.get("settings", {})) and spec.get("method") != "sft"
        else []
    )


@all_entered
def liger_installed(spec: Mapping[str, Any]) -> Iterator[AbstractContextManager[None]]:
    """Run Liger on fake tensors, if the settings enable it."""
    if not _wants_liger(spec.get("settings", {})):
        return
    try:  # all of its operations, so that none is imported later with active kernels
        for name in ("liger_kernel.transformers", "liger_kernel.chunked_loss"):
            importlib.import_module(name)
    except ImportError as error:
        raise Untraceable(
            f"Liger's kernels: liger-kernel cannot be imported: {error}. Install it, or turn off"
            " use_liger_kernel."
        ) from error
    yield checks_as_on_cuda(
        "liger_kernel", lambda name: name.startswith("liger_kernel.ops.fused_linear_")
    )
    yield not_launched("liger_kernel.ops.")
    yield attribute(
        torch,
        "compile",
        lambda function=None, **_: (lambda function: function) if function is None else function,
    )
    yield _restored_models(spec)


@contextmanager
def _restored_models(spec: Mapping[str, Any]) -> Iterator[None]:
    """Restore transformers' modules after the trace: Liger patches them for the whole process."""
    kind = str((spec["model"].get("config") or {}).get("model_type", ""))
    with suppress(ImportError):
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name
    ]
    holders = [
        *modules,
        *{
            value
            for module in modules
            for value in vars(module).values()
            if isinstance(value, type)
        },
    ]
    before = [(holder, dict(vars(holder))) for holder in holders]
    try:
        yield
    finally:
        for holder, names in before:
            for name, value in list(vars(holder).items()):
                if names.get(name) is not value and str(
                    getattr(value, "__module__", "")
                ).startswith("liger_kernel"):
                    setattr(holder, name, names[name]) if name in names else delattr(holder, name)
