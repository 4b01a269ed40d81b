"""Messages that several threads read."""

from __future__ import annotations

from typing import TypeVar

import msgspec

_T = TypeVar("_T")


def read_by_threads(kind: type[_T]) -> type[_T]:
    """This class, already known to msgspec, which otherwise learns it when it first meets it, and notes what it knows before it
    knows all of it: two threads that meet a class together for the first time end in a segmentation fault."""
    msgspec.json.Decoder(kind)
    return kind
