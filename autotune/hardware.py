"""Hardware: what `--gpus` asked for, as facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The devices a job is to run on: all alike, one training rank each."""

    kind: DeviceKind
    """What runs the tensors: a CPU (gloo between ranks) or an NVIDIA GPU (nccl)."""

    name: str
    """The catalogue's name, or what the device calls itself: `A100-40G`, `cpu`."""

    count: int
    """How many devices, and so how many ranks."""

    memory_bytes: int
    """Per GPU: its memory as the driver shows it. On a CPU: the machine's (or our cgroup's), which all ranks share."""

    here: bool
    """Whether this machine has them, so that a probe can measure."""

    @property
    def memory_is_shared(self) -> bool:
        """True where one memory serves all ranks, so that a limit binds the tree and not each device."""
        return self.kind == "cpu"

    def __str__(self) -> str:
        return self.name if self.count == 1 else f"{self.count}x{self.name}"
