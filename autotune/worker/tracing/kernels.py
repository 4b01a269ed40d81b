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

from . import Spec, Untraceable
from .patching import all_entered, attribute, swapped, torch_kernels

aten = torch.ops.aten

LIGER_ABSENT = (
    "use_liger_kernel: liger-kernel is not installed here, so that the step is traced without it;"
    " its kernels keep less, and the peak is at most this"
)
LIGER_NOTE = (
    "liger's chunked loss is traced uncompiled: inside one chunk a GPU may keep fewer temporaries"
)


# 1. Operations.


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
    if out is not None:
        return out
    return sums.new_empty((left.shape[0], right.shape[1]), dtype=out_dtype)


# Fake tensors use torch's own decompositions alone, which they tell by these two names.
_product_added.__module__ = "torch._decomp.decompositions"
_product_added.__name__ = "addmm"


def _dropout(
    values: Any,
    p: float,
    train: bool,
) -> Any:
    """Save a mask of one byte per element, as CUDA does; the CPU saves the element's own width."""
    if not train or p == 0 or values.numel() == 0:
        return values
    if p == 1:
        return values.mul(torch.zeros((), dtype=values.dtype, device=values.device))
    return aten.native_dropout(values, p, train)[0]


def _softmax(
    operation: Any,
    values: Any,
    dim: int,
    dtype: Any = None,
) -> Any:
    """Widen float16 to float32 inside the kernel, as CUDA does; other pairs are copied."""
    if values.dtype is torch.float16 and dtype is torch.float32:
        return operation(values, dim, True)
    if dtype is not None:
        values = values.to(dtype)
    return operation(values, dim, False)


# 2. Checks of the device.


@all_entered
def checks_as_on_cuda(
    package: str, selects: Callable[[str], bool]
) -> Iterator[AbstractContextManager[None]]:
    """Let the functions of a package's modules, that `selects` accepts, choose as on CUDA.

    A function is replaced in every module of the package that has imported it.
    """
    modules = []
    replacements: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != package:
            continue
        modules.append(module)
        if selects(name):
            replacements |= _recompiled_functions(module, name)
    for module in modules:
        for name, value in list(vars(module).items()):
            if id(value) in replacements:
                yield swapped(vars(module), name, replacements[id(value)])


def _recompiled_functions(module: Any, module_name: str) -> dict[int, Any]:
    """Return the changed functions of a module, by id of the original."""
    replacements = {}
    for value in list(vars(module).values()):
        if isinstance(value, FunctionType) and value.__module__ == module_name:
            changed = recompiled(value)
            if changed is not None:
                replacements[id(value)] = changed
    return replacements


@all_entered
def attention_on_cuda() -> Iterator[AbstractContextManager[None]]:
    """Let models' methods that call torch's attention choose as on CUDA: some copy inputs."""
    for cls in _model_classes():
        for name, method in list(vars(cls).items()):
            if not isinstance(method, FunctionType):
                continue
            if "scaled_dot_product_attention" not in method.__code__.co_names:
                continue
            changed = recompiled(method)
            if changed is not None:
                yield attribute(cls, name, changed)


def _model_classes() -> list[Any]:
    """Return the classes that transformers' imported models define."""
    classes = []
    for name, module in _model_modules().items():
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == name:
                classes.append(value)
    return classes


def _model_modules() -> dict[str, Any]:
    return {
        name: module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.models.") and ".modeling_" in name
    }


@functools.cache
def recompiled(function: FunctionType) -> Any:
    """Return the function with its CUDA checks answered; None if it has none."""
    # 1. The source, with the checks replaced.
    try:
        source = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(source)
    except (OSError, TypeError, SyntaxError):
        return None
    checks = _CudaChecks()
    tree = ast.fix_missing_locations(checks.visit(tree))
    definition = tree.body[0]
    if not checks.count or not isinstance(definition, ast.FunctionDef) or function.__closure__:
        return None

    # 2. The function in its own module.
    definition.decorator_list = []
    ast.increment_lineno(definition, function.__code__.co_firstlineno - 1)
    future = ast.parse("from __future__ import annotations").body
    module = ast.Module([*future, definition], [])
    code = compile(module, inspect.getfile(function), "exec")
    names: dict[str, Any] = {}
    exec(code, function.__globals__, names)
    changed = names[function.__name__]
    changed.__defaults__ = function.__defaults__
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


class _CudaChecks(ast.NodeTransformer):
    """Replaces `x.type == "cuda"`, `x.type in ("cuda", ...)`, `x.is_cuda`, and their opposites."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Compare(self, node: ast.Compare) -> Any:
        self.generic_visit(node)
        is_type = isinstance(node.left, ast.Attribute) and node.left.attr == "type"
        if len(node.ops) != 1 or not is_type:
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


# 3. Triton.


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
    for module_name in list(sys.modules):
        if not module_name.startswith(prefix):
            continue
        names = vars(sys.modules[module_name])
        for name, value in list(names.items()):
            if _is_kernel(name, value):
                yield swapped(names, name, NoKernel())
        if "triton" not in names:
            yield swapped(names, "triton", SimpleNamespace(cdiv=_cdiv))


def _is_kernel(name: str, value: Any) -> bool:
    """Recognise a kernel by its class, or by its name and an argument."""
    package = type(value).__module__.split(".")[0]
    is_triton = package == "triton"
    if is_triton and hasattr(value, "__getitem__") and hasattr(value, "run"):
        return True
    if not name.endswith("_kernel") or not isinstance(value, FunctionType):
        return False
    code = value.__code__
    arguments = code.co_varnames[: code.co_argcount]
    return any("BLOCK" in argument for argument in arguments)


def install_triton_stub() -> None:
    """Install a stub of Triton if it is missing, as with torch's CPU builds.

    Call it before transformers or TRL are imported. Kernels that are decorated and never launched
    need only the names.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    triton = _AnyNames("triton")
    language = _AnyNames("triton.language")
    for module in (triton, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
        module.__path__ = []
        sys.modules[module.__name__] = module
    vars(triton).update(
        language=language,
        __version__="3.0.0",
        jit=_jit,
        cdiv=_cdiv,
        next_power_of_2=lambda n: 1 << (n - 1).bit_length(),
    )


class _AnyNames(ModuleType):
    """Module with every name that a kernel's source may use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NoKernel()


def _jit(kernel: Any = None, **options: Any) -> Any:
    if kernel is None:
        return lambda kernel: NoKernel()
    return NoKernel()


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


# 4. Liger.


def liger_notes(spec: Spec) -> list[str]:
    """Return the deviations of a trace of this specification."""
    if liger_is_absent(spec):
        return [LIGER_ABSENT]
    if _uses_liger(spec) and spec.get("method") != "sft":
        return [LIGER_NOTE]
    return []


LIGER_SETTINGS = frozenset({"use_liger_kernel", "use_liger_loss"})


def _uses_liger(spec: Spec) -> bool:
    settings = spec.get("settings", {})
    return any(settings.get(name) for name in LIGER_SETTINGS)


def liger_is_absent(spec: Spec) -> bool:
    """Return True if the settings enable Liger, and it is not installed."""
    return _uses_liger(spec) and importlib.util.find_spec("liger_kernel") is None


@all_entered
def liger_installed(spec: Spec) -> Iterator[AbstractContextManager[None]]:
    """Run Liger on fake tensors, if the settings enable it."""
    if not _uses_liger(spec) or liger_is_absent(spec):
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
    yield attribute(torch, "compile", _uncompiled)
    yield _restored_models(spec)


def _uncompiled(function: Any = None, **_: Any) -> Any:
    """`torch.compile` that compiles nothing, called with a function or as a decorator."""
    if function is None:
        return lambda function: function
    return function


@contextmanager
def _restored_models(spec: Spec) -> Iterator[None]:
    """Restore transformers' modules after the trace: Liger patches them for the whole process."""
    # 1. The names before.
    config = spec["model"].get("config") or {}
    kind = config.get("model_type", "")
    with suppress(ImportError):
        importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    modules = list(_model_modules().values())
    classes = set()
    for module in modules:
        classes |= {value for value in vars(module).values() if isinstance(value, type)}
    previous_names = [(owner, dict(vars(owner))) for owner in (*modules, *classes)]
    try:
        yield
    finally:
        # 2. Those that are Liger's now.
        for owner, previous in previous_names:
            for name, value in list(vars(owner).items()):
                if previous.get(name) is not value and _is_of_liger(value):
                    _restore(owner, name, previous)


def _is_of_liger(value: Any) -> bool:
    module_name = str(getattr(value, "__module__", ""))
    return module_name.startswith("liger_kernel")


def _restore(
    owner: Any,
    name: str,
    previous: Mapping[str, Any],
) -> None:
    if name in previous:
        setattr(owner, name, previous[name])
    else:
        delattr(owner, name)
