"""The GPU whose choices a trace on fake CPU tensors follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DEFAULT_CAPABILITY = (8, 0)
"""Of an A100, where the specification does not say: from 8.0 up torch chooses the same kernels, Hopper's cuDNN aside."""

_capability = DEFAULT_CAPABILITY


def capability() -> tuple[int, int]:
    """Compute capability of the GPU that is followed now."""
    return _capability


@contextmanager
def of(spec: Any) -> Iterator[None]:
    """Meanwhile the GPU is the specification's: `"capability": [major, minor]` (or "major.minor"), where it has one."""
    global _capability
    before = _capability
    asked = spec.get("capability")
    if isinstance(asked, str):
        asked = asked.split(".")
    _capability = (int(asked[0]), int(asked[1])) if asked else DEFAULT_CAPABILITY
    try:
        yield
    finally:
        _capability = before
