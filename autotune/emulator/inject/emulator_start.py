"""Code that runs right after certain modules were imported: the values of tensors, the phases of
a step.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

After = Callable[[ModuleType], None]

_modes: list[Any] = []
"""The main thread's mode: torch takes modes off and puts them on again without holding on to them
itself.
"""


def begin() -> None:
    """Install the hooks in a process on emulated cards: for torch, and for modules with phases
    if these are requested.
    """
    if not os.environ.get("AUTOTUNE_EMULATED_MACHINE"):
        return
    _record_rank()
    sys.meta_path.insert(0, _TorchImportHook(_hooks_by_module()))
    sys.meta_path.append(_AbsentKernels())


def _record_rank() -> None:
    """Write the rank that a launcher gave this process, beside the report of its memory."""
    rank = os.environ.get("RANK", "")
    folder = os.environ.get("AUTOTUNE_EMULATOR_REPORT")
    if rank.isdigit() and folder is not None:
        path = os.path.join(folder, f"{os.getpid()}.rank")  # noqa: PTH118
        with open(path, "w") as file:  # noqa: PTH123
            file.write(rank)


def _hooks_by_module() -> dict[str, list[After]]:
    """Return the hooks by module. Shortened rollouts are inside the phases, whose hooks therefore
    come later.
    """
    hub = importlib.import_module("emulator_hub")
    phases = importlib.import_module("emulator_phases")
    rollouts = importlib.import_module("emulator_rollouts")
    tables: list[dict[str, After]] = [
        {"torch": _keep_values, "deepspeed.ops.op_builder.fused_adam": _without_compiling}
    ]
    if os.environ.get("AUTOTUNE_TRACKERS") != "1":
        tables.append(hub.HUB)
    if os.environ.get("AUTOTUNE_EMULATOR_STRIDE"):
        tables.append(rollouts.ROLLOUTS)
    if os.environ.get("AUTOTUNE_EMULATOR_PHASES"):
        tables.append(phases.PHASE_HOOKS)

    hooks_by_module: dict[str, list[After]] = {}
    for table in tables:
        for module_name, hook in table.items():
            hooks_by_module.setdefault(module_name, []).append(hook)
    return hooks_by_module


# 1. Import hooks.


class _TorchImportHook(importlib.abc.MetaPathFinder):
    """Import hook that finds a module like the other finders, and runs code after its import.

    A mere `find_spec`, the usual test for a package, changes nothing: the import after it passes
    through here again.
    """

    def __init__(self, hooks_by_module: dict[str, list[After]]) -> None:
        self._hooks_by_module = hooks_by_module

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._hooks_by_module:
            return None
        spec = self._found_behind(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_with_hooks(module: ModuleType) -> None:
            execute(module)
            for hook in self._hooks_by_module[name]:
                hook(module)

        spec.loader.exec_module = execute_with_hooks  # type: ignore[method-assign]
        return spec

    def _found_behind(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Ask only the finders behind this one: another hook of this kind would ask this one
        again, without end.
        """
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


class _AbsentKernels(importlib.abc.MetaPathFinder):
    """Last of the finders: flash-attn's compiled module where it was not built."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "flash_attn_2_cuda":
            return None
        folder = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120
        file = os.path.join(folder, "emulator_flash_attention.py")  # noqa: PTH118
        return importlib.util.spec_from_file_location(name, file)


# 2. Hooks.


class _NoKernels:
    """DeepSpeed's fused Adam without its kernel, which is compiled by nvcc on the first use.

    The kernel updates weights and moments where they are. It allocates nothing, and on emulated
    cards no kernel computes: memory is the same.
    """

    @staticmethod
    def multi_tensor_adam(*args: Any) -> None:
        """Launch nothing."""


def _without_compiling(module: ModuleType) -> None:
    """Replace the builder's compilation in `deepspeed.ops.op_builder.fused_adam`."""
    module.FusedAdamBuilder.load = lambda builder, verbose=True: _NoKernels


def _keep_values(torch: ModuleType) -> None:
    """Enter the dispatch mode in this thread and in all that start later: it belongs to one
    thread.
    """
    if getattr(torch.version, "cuda", None) is None:
        return

    # 1. Choices of kernels.
    def report_architectures() -> None:
        """Report to the emulated runtime which capabilities torch's kernels were compiled for."""
        library = ctypes.CDLL(None)
        for number in re.findall(r"\bsm_(\d+)\b", torch._C._cuda_getArchFlags() or ""):
            library.emu_compiled_for(int(number))

    # Not before CUDA is initialised: torch 2.11 refuses CUDA in forks of a process that asked for
    # the architectures.
    torch.cuda._lazy_call(report_architectures)
    # Attention's first choice from Hopper on; its engines are absent here.
    torch._C._set_sdp_use_cudnn(False)

    # 2. The mode.
    emulator_values = importlib.import_module("emulator_values")
    importlib.import_module("emulator_printing").print_what_is_there()
    mode = emulator_values.TrueValues()
    _modes.append(mode)
    mode.__enter__()
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap_with_values(thread: Any) -> None:
        with emulator_values.TrueValues():
            bootstrap(thread)

    threading.Thread._bootstrap_inner = bootstrap_with_values  # type: ignore[attr-defined]
