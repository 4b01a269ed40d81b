"""Stands in for packages that only a GPU machine has, so that the rest of a framework's
configuration code can be imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

GPU_ONLY = (
    "flash_attn",
    "vllm",
    "deepspeed",
    "cupy",
    "megatron",
    "liger_kernel",
    "torch_npu",
    "sglang",
)


class _Absent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "0.0"
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():  # a class, of which others may be made
            return type(name, (), {})
        return MagicMock(name=f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        name: str,
        path: Any,
        target: Any = None,
    ) -> importlib.machinery.ModuleSpec | None:
        absent = any(name == package or name.startswith(f"{package}.") for package in GPU_ONLY)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Absent(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Empty module."""


def stand_in() -> None:
    """Replace packages that are not installed, or that would look for a GPU."""
    sys.meta_path.insert(0, _Finder())
