"""NVML of emulated cards, for the process that watches them from outside."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import sys
from types import ModuleType

from autotune.emulator.build import Built
from autotune.emulator.launch import Stand, variables


def nvml_of(built: Built, stand: Stand) -> ModuleType:
    """Return nvidia-ml-py's module, bound to the cards of this stand.

    The module is a copy of its own and so is the library: a process may watch several machines, real ones among them.
    """
    original = importlib.util.find_spec("pynvml")
    assert original is not None and original.origin is not None  # a dependency of autotune
    spec = importlib.util.spec_from_file_location(f"pynvml of {stand.folder.name}", original.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it looks itself up there
    spec.loader.exec_module(module)
    library = stand.folder / "libnvidia-ml-watching.so"
    shutil.copyfile(built.library, library)
    named = variables(stand)  # the library reads them once, while it is loaded
    before = {name: os.environ.get(name) for name in named}
    os.environ.update(named)
    try:
        module.nvmlLib = ctypes.CDLL(str(library))  # type: ignore[attr-defined]
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return module
