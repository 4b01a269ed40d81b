"""Efficiency of engines and kernels from public sources (efficiency.yaml)."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.catalog.constants import Constant, constants


def efficiencies() -> Mapping[str, Constant]:
    """Return all efficiencies by name."""
    return constants("efficiency.yaml")


def efficiency(name: str) -> Constant:
    return efficiencies()[name]
