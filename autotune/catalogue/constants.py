"""Memory that no trace shows, as public sources state it: the one loader of constants.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One figure with what is known about its spread."""

    name: str
    unit: str
    low: float
    value: float
    high: float
    why: str
    """What was seen, and where the spread comes from."""

    sources: tuple[str, ...]
    """Public pages."""


@dataclass(frozen=True, kw_only=True)
class _File:
    schema: Literal[1]
    constants: tuple[Constant, ...]


@functools.cache
def constants() -> Mapping[str, Constant]:
    """All of them by name."""
    import msgspec.yaml

    text = resources.files("autotune.catalogue").joinpath("constants.yaml").read_bytes()
    return {constant.name: constant for constant in msgspec.yaml.decode(text, type=_File).constants}


def constant(name: str) -> Constant:
    return constants()[name]
