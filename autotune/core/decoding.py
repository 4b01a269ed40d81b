"""Message types that several threads decode."""

from __future__ import annotations

from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def read_by_threads(kind: type[_T]) -> type[_T]:
    """Register a class with msgspec at import time. msgspec inspects a class on first use and publishes incomplete type
    information meanwhile: two threads that decode a class for the first time at once cause a segmentation fault."""
    msgspec.json.Decoder(kind)
    return kind
