"""What engines and kernels reach, as public sources state it: the one loader of efficiency.yaml."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from autotune.catalogue.constants import Constant


@dataclass(frozen=True, kw_only=True)
class _File:
    schema: Literal[1]
    constants: tuple[Constant, ...]


@functools.cache
def efficiencies() -> Mapping[str, Constant]:
    """All of them by name."""
    import msgspec.yaml

    text = resources.files("autotune.catalogue").joinpath("efficiency.yaml").read_bytes()
    return {constant.name: constant for constant in msgspec.yaml.decode(text, type=_File).constants}


def efficiency(name: str) -> Constant:
    return efficiencies()[name]
