"""Constants from public sources: memory that no trace contains (constants.yaml)."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autotune.core.prediction import Estimate
from autotune.core.yaml_document import packaged_table


@dataclass(frozen=True, kw_only=True)
class Constant(Estimate):
    """Estimate from public sources."""

    name: str
    unit: str
    why: str  # observation, and the reason for the spread
    sources: tuple[str, ...]  # public pages


@dataclass(frozen=True, kw_only=True)
class _ConstantsFile:
    schema: Literal[1]
    constants: tuple[Constant, ...]


@functools.cache
def constants(file: str = "constants.yaml") -> Mapping[str, Constant]:
    """Return all constants of a catalogue file by name."""
    return {constant.name: constant for constant in packaged_table("autotune.catalog", file, _ConstantsFile).constants}


def constant(name: str) -> Constant:
    """Return a memory constant that no trace contains."""
    return constants()[name]


def efficiency(name: str) -> Constant:
    return constants("efficiency.yaml")[name]
