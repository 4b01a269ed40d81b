"""Putting something in a name's place, or a kernel in one of torch's, and the old one back afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

_ABSENT = object()


@contextmanager
def swapped(names: MutableMapping[str, Any], name: str, value: Any) -> Iterator[None]:
    """In a module's names (`vars(module)`) or in `sys.modules`."""
    before = names.get(name, _ABSENT)
    names[name] = value
    try:
        yield
    finally:
        if before is _ABSENT:
            names.pop(name, None)
        else:
            names[name] = before


@contextmanager
def attribute(holder: Any, name: str, value: Any) -> Iterator[None]:
    """On a class or an object that has it (or gets it for the while)."""
    before = vars(holder).get(name, _ABSENT)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


@contextmanager
def torch_kernels(install: Callable[[Any], None]) -> Iterator[None]:
    """Kernels of torch's own operations, put by `install` into the library that it is given."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel of torch is replaced is the point
            install(library)
        yield
    finally:
        library._destroy()
