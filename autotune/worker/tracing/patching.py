"""Temporary replacement of names, attributes and torch kernels."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ParamSpec

import torch

_ABSENT = object()
_P = ParamSpec("_P")


def all_entered(
    managers: Callable[_P, Iterator[AbstractContextManager[Any]]],
) -> Callable[_P, AbstractContextManager[None]]:
    """Make a generator of context managers one manager: it enters each before it requests the
    next.
    """

    @contextmanager
    @functools.wraps(managers)
    def entered(*args: _P.args, **kwargs: _P.kwargs) -> Iterator[None]:
        with ExitStack() as stack:
            for manager in managers(*args, **kwargs):
                stack.enter_context(manager)
            yield

    return entered


@contextmanager
def swapped(
    names: MutableMapping[Any, Any],
    name: Any,
    value: Any,
) -> Iterator[None]:
    """Replace an entry of a module's names (`vars(module)`) or of `sys.modules`."""
    previous = names.get(name, _ABSENT)
    names[name] = value
    try:
        yield
    finally:
        if previous is _ABSENT:
            names.pop(name, None)
        else:
            names[name] = previous


@contextmanager
def attribute(
    owner: Any,
    name: str,
    value: Any,
) -> Iterator[None]:
    """Replace or add an attribute of a class or an object."""
    previous = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if previous is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, previous)


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
