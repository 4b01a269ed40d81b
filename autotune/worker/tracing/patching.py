"""Temporary replacement of names, attributes and torch kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

_ABSENT = object()


@contextmanager
def swapped(names: MutableMapping[Any, Any], name: Any, value: Any) -> Iterator[None]:
    """Replace an entry of a module's names (`vars(module)`) or of `sys.modules`."""
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
    """Replace or add an attribute of a class or an object."""
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
    """Replace kernels of torch's operations; `install` receives the library."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # replacing torch's kernels is intended
            install(library)
        yield
    finally:
        library._destroy()
