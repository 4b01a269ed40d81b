"""Hardware: the devices that `--gpus` requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]
Basis = Literal["measured", "emulated", "predicted"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Devices of a job: identical, one training rank each."""

    kind: DeviceKind  # collectives run over gloo on CPUs and over NCCL on NVIDIA GPUs
    name: str  # catalogue name, or the device's own: `A100-40G`, `cpu`
    count: int  # devices, and therefore ranks
    memory_bytes: int  # per GPU (driver), or of the machine or cgroup (CPU)
    here: bool  # present on this machine, so that a probe can measure
    emulated: bool = False  # `here`, as emulated GPUs: memory is emulated, speed is predicted

    @property
    def memory_is_shared(self) -> bool:
        """Return True if one memory serves all ranks and the limit applies to the process tree."""
        return self.kind == "cpu"

    @property
    def basis(self) -> Basis:
        """Return the kind of figures that this hardware gives."""
        return "emulated" if self.emulated else "measured" if self.here else "predicted"

    def __str__(self) -> str:
        words = self.name if self.count == 1 else f"{self.count}x{self.name}"
        return f"emulated {words}" if self.emulated else words
