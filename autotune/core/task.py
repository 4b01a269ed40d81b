"""Task: a workload on hardware."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.core.hardware import Hardware
from autotune.core.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Task:
    """Workload on hardware: the argument of every trainer method."""

    workload: Workload
    hardware: Hardware
