"""Python runs this at the start of each process: the packages below are not found, as if they were
not installed. A module of this name that this one hides runs afterwards.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

HIDDEN = ("vllm", "bitsandbytes", "scipy")
FILE = Path(__file__).resolve()


class WithoutHidden(importlib.machinery.PathFinder):
    """The finder of installed packages, for all but the hidden ones."""

    @classmethod
    def find_spec(
        cls,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in HIDDEN:
            return None
        return super().find_spec(fullname, path, target)


def run_next() -> None:
    folders_that_ran = sys.__dict__.setdefault("autotune_sitecustomize", set())
    folders_that_ran.add(FILE.parent)
    path = [entry for entry in sys.path if Path(entry or ".").resolve() not in folders_that_ran]
    spec = importlib.machinery.PathFinder.find_spec(FILE.stem, path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if importlib.machinery.PathFinder in sys.meta_path:
    place = sys.meta_path.index(importlib.machinery.PathFinder)
    sys.meta_path[place] = WithoutHidden
run_next()
