"""Imports of libraries that a process keeps, in two thirds of the time that they take otherwise.

Of 4.6 CPU seconds for torch, transformers, PEFT and TRL, one is the garbage collector's, and nearly
half a second goes into looking through all installed packages.
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager

OF_PYTHON_310 = "packages_distributions"


@contextmanager
def kept_imports() -> Iterator[None]:
    """Import without the collector, since nearly all of a million objects stay, and look through
    the installed packages once for transformers and TRL.
    """
    functions = vars(importlib.metadata)
    packages = functions.get(OF_PYTHON_310)
    if packages is not None:
        functions[OF_PYTHON_310] = functools.cache(packages)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if packages is not None:
            functions[OF_PYTHON_310] = packages
