"""Hook that patches modules right after their import."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from typing import Any

Patch = Callable[[Any], None]
"""Function that changes a module."""


class AfterImport(importlib.abc.MetaPathFinder):
    """Applies patches to modules, by name; a finder for the front of `sys.meta_path`."""

    def __init__(self, patches: dict[str, list[Patch]]) -> None:
        self._patches = patches

    def find_spec(
        self,
        fullname: str,
        path: Any,
        target: Any = None,
    ) -> Any:
        if fullname not in self._patches:
            return None
        spec = self._real_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        patches = self._patches.pop(fullname)
        execute = spec.loader.exec_module

        def execute_and_patch(module: Any) -> None:
            execute(module)
            for patch in patches:
                patch(module)

        spec.loader.exec_module = execute_and_patch
        return spec

    def _real_spec(
        self,
        fullname: str,
        path: Any,
        target: Any,
    ) -> Any:
        """Return the specification that the import would use without this hook."""
        # Only finders behind this one: another hook of this kind would ask this one again, without
        # end.
        position = sys.meta_path.index(self)
        for finder in sys.meta_path[position + 1 :]:
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(fullname, path, target)
                if spec is not None:
                    return spec
        return None
