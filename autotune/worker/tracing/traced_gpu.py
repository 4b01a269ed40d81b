"""The GPU whose choices a trace on fake CPU tensors reproduces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DEFAULT_CAPABILITY = (8, 0)
"""A100, unless specified: from 8.0 on torch selects the same kernels, except Hopper's cuDNN."""

_capability = DEFAULT_CAPABILITY


def capability() -> tuple[int, int]:
    """Compute capability of the traced GPU."""
    return _capability


@contextmanager
def of(spec: Any) -> Iterator[None]:
    """Trace for the specification's `"capability"`: [major, minor] or "major.minor"."""
    global _capability
    before = _capability
    given = spec.get("capability")
    if isinstance(given, str):
        given = given.split(".")
    _capability = (int(given[0]), int(given[1])) if given else DEFAULT_CAPABILITY
    try:
        yield
    finally:
        _capability = before
