"""Emulated machines: their cards, other users of these, and the file that describes them to the
library.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from autotune.catalog import Gpu, bare_context, constant, efficiency, loaded_kernels
from autotune.core.errors import BadInput
from autotune.core.units import MIB, format_bytes
from autotune.machine.hardware_detection import gpu_named

MOST_CARDS = 16
"""Capacity of the library's tables; the largest machines with one address space have 16."""

LONGEST_LAG = 1024
"""Launches that a card's queue holds before the host waits: with it, memory is kept waiting as
long as it can be.
"""

State = Literal["ok", "busy", "lost", "forbidden", "memoryless"]
"""`busy`: no context can be made. `lost`: nor does NVML answer. `forbidden`: NVML refuses this
user. `memoryless`: NVML reports no memory, as where host and GPU share it.
"""

_COUNT_AND_NAME = re.compile(r"(?:(\d+)\s*x\s*)?(\S.*)", re.IGNORECASE)

_PROFILE = re.compile(r"([1-7])g\.(\d+)gb")
UNKNOWN_MULTIPROCESSORS = 100
"""Assumed for cards whose number the catalog lacks."""

_SHARED_KIB = {
    "7.0": 96,
    "7.5": 64,
    "8.0": 164,
    "8.6": 100,
    "8.7": 164,
    "8.9": 100,
    "9.0": 228,
    "10.0": 228,
    "10.3": 228,
    "12.0": 100,
}
"""Shared memory of a multiprocessor by compute capability: the table of technical specifications
in NVIDIA's CUDA guide.
"""

_L2_MIB = {
    "7.0": 6,
    "7.5": 4,
    "8.0": 40,
    "8.6": 6,
    "8.9": 72,
    "9.0": 50,
    "10.0": 126,
    "10.3": 126,
    "12.0": 96,
}
"""Level 2 cache of the largest chip of each capability, by NVIDIA's architecture whitepapers.
Kernels choose tiles by it.
"""

_FULL_NAMES = {
    "A100-40G": "NVIDIA A100-SXM4-40GB",
    "A100-80G": "NVIDIA A100-SXM4-80GB",
    "H100": "NVIDIA H100 80GB HBM3",
    "H200": "NVIDIA H200",
    "B200": "NVIDIA B200",
    "L4": "NVIDIA L4",
    "L40S": "NVIDIA L40S",
    "T4": "Tesla T4",
    "A10": "NVIDIA A10",
    "V100-16G": "Tesla V100-SXM2-16GB",
    "V100-32G": "Tesla V100-SXM2-32GB",
}
"""Names as drivers report them; the other cards have the catalog's name."""


@dataclass(frozen=True, kw_only=True)
class EmulatedCard:
    """Emulated card."""

    gpu: Gpu
    foreign_mib: int = 0  # held by processes that are not emulated
    state: State = "ok"
    slices: tuple[str, ...] = ()
    """MIG profiles that it is cut into, such as 3g.20gb; empty without MIG."""
    limit_mib: int | None = None  # of what CUDA offers; None: all

    def slice(self, profile: str) -> tuple[int, int]:
        """Return multiprocessors and MiB of a slice; BadInput for no profile of this card.

        Memory is divided in eighths, of which a profile names its own in rounded GB. Example: of
        an A100 with 40 GB and 108 multiprocessors, 3g.20gb has 3 x 14 multiprocessors and 4 eighths
        of the memory.
        """
        match = _PROFILE.fullmatch(profile)
        if match is None:
            raise self._not_a_profile(profile)
        parts = int(match[1])
        profile_gb = int(match[2])
        eighths = round(8 * profile_gb / round(self.gpu.memory_mib / 1024))
        if not 1 <= eighths <= 8:
            raise self._not_a_profile(profile)
        per_part = self.multiprocessors // 8 // 2 * 2 + 2
        multiprocessors = min(per_part * parts, self.multiprocessors)
        return multiprocessors, self.memory_mib * eighths // 8

    def _not_a_profile(self, profile: str) -> BadInput:
        return BadInput(
            f"{profile!r} is no MIG profile of {self.gpu.name}.",
            way_out="Write it like 3g.20gb.",
        )

    @property
    def name(self) -> str:
        """Return what the driver calls it."""
        if self.gpu.name in _FULL_NAMES:
            return _FULL_NAMES[self.gpu.name]
        name_parts = ["NVIDIA"]
        for word in self.gpu.names[0].split():
            name_parts.append(word.upper() if re.search(r"\d", word) else word.title())
        return " ".join(name_parts)

    @property
    def multiprocessors(self) -> int:
        return self.gpu.multiprocessors or UNKNOWN_MULTIPROCESSORS

    @property
    def reserved_mib(self) -> int:
        """Return what the driver keeps beside what CUDA offers: a catalog figure seen by torch
        is what CUDA offers.
        """
        return round(efficiency("driver_reserve_mib").value)

    @property
    def memory_mib(self) -> int:
        """Return what CUDA offers."""
        if self.limit_mib is not None:
            return self.limit_mib
        if self.gpu.seen_by == "torch":
            return self.gpu.memory_mib
        return self.gpu.memory_mib - self.reserved_mib

    @property
    def context_mib(self) -> int:
        """Return what a process takes with its context, before any kernel."""
        return round(bare_context(self.gpu).value / MIB)

    def nccl_mib(self, cards: int) -> int:
        """Return the size of a communicator on a machine with this number of cards."""
        name = "nccl_mib_pcie"
        if self.gpu.link == "nvlink":
            name = "nccl_mib_two_nvlink" if cards == 2 else "nccl_mib_many_nvlink"
        return round(constant(name).value)


@dataclass(frozen=True, kw_only=True)
class EmulatedMachine:
    """Cards, and how they behave."""

    cards: tuple[EmulatedCard, ...]
    # Launches after which work counts as finished without anybody waiting for it; 0: at once. The
    # two ends of this scale bracket what torch's allocator reserves.
    lag: int = 0
    hides_processes: bool = False  # true where NVML lists no process, as inside containers
    # added to the numbers of processes that NVML lists, as where they are those of another
    # namespace
    pid_shift: int = 0

    def limited_to(self, size: int) -> EmulatedMachine:
        """Return the machine with cards that offer this many bytes; BadInput for more than they
        have.
        """
        limit_mib = size // MIB
        cards = []
        for card in self.cards:
            if limit_mib > card.memory_mib:
                offered = format_bytes(card.memory_mib * MIB)
                raise BadInput(
                    f"--limit is above the {offered} that CUDA offers there.",
                    way_out="Give less, or leave it out.",
                )
            cards.append(replace(card, limit_mib=limit_mib))
        return replace(self, cards=tuple(cards))

    def text(self, cuda_version: tuple[int, int]) -> str:
        """Return the description that the library reads, for a torch that was built with this
        CUDA.
        """
        major, minor = cuda_version
        version = major * 1000 + minor * 10
        machine = {
            "driver": version,
            "runtime": version,
            "lag": self.lag,
            "hides_processes": int(self.hides_processes),
            "pid_shift": self.pid_shift,
        }
        lines = [_line("machine", machine)]
        for index, card in enumerate(self.cards):
            fields = self._fields(index, card)
            lines.append(_line("sliced" if card.slices else "card", fields))
            for number, profile in enumerate(card.slices):
                slice_fields = _slice_fields(
                    card, f"{card.gpu.name} {index} slice {number}", profile
                )
                lines.append(_line("slice", {**fields, **slice_fields}))
        return "".join(lines)

    def _fields(self, index: int, card: EmulatedCard) -> dict[str, object]:
        gpu = card.gpu
        capability = gpu.compute_capability or "8.0"
        return {
            "name": card.name,
            "uuid": f"GPU-{_uuid(f'{gpu.name} {index}')}",
            "capability": capability,
            "multiprocessors": card.multiprocessors,
            "shared_kib": _SHARED_KIB.get(capability, 100),
            "l2_mib": _L2_MIB.get(capability, 40),
            "clock_khz": 1410000,
            "bus_bits": 5120,
            "nvlink": int(gpu.link == "nvlink"),
            "memory_mib": card.memory_mib,
            "reserved_mib": card.reserved_mib,
            "context_mib": card.context_mib,
            "kernels_mib": round(loaded_kernels(gpu).value / MIB),
            "engine_kernels_mib": round(constant("vllm_non_torch_beside_trainer_mib").value),
            "nccl_mib": card.nccl_mib(len(self.cards)),
            "foreign_mib": card.foreign_mib,
            "state": card.state,
        }


def _slice_fields(
    card: EmulatedCard,
    identity: str,
    profile: str,
) -> dict[str, object]:
    """Return the fields in which a slice differs from its card."""
    multiprocessors, memory_mib = card.slice(profile)
    return {
        "name": f"{card.name} MIG {profile}",
        "uuid": f"MIG-{_uuid(identity)}",
        "multiprocessors": multiprocessors,
        "memory_mib": memory_mib,
        "reserved_mib": 0,
        "foreign_mib": 0,
    }


def _uuid(identity: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_OID, f"autotune emulated {identity}")


def _line(kind: str, fields: Mapping[str, object]) -> str:
    columns = [kind]
    for name, value in fields.items():
        columns.append(f"{name}={value}")
    return "\t".join(columns) + "\n"


def emulated_machine(text: str, *, lag: int = 0) -> EmulatedMachine:
    """Return the machine for a value of `--gpus`: `2xA100-40G`, `H100`."""
    match = _COUNT_AND_NAME.fullmatch(text.strip())
    count = 0
    name = ""
    if match is not None:
        count = int(match[1] or 1)
        name = match[2]
    if not 1 <= count <= MOST_CARDS:
        raise BadInput(
            f"{text!r} is no number of cards from 1 to {MOST_CARDS}.",
            way_out="Write it like 2xA100-40G.",
        )
    if name.lower() in ("cpu", "local"):
        raise BadInput(
            f"{text!r} names no card that could be emulated.",
            way_out="Name one, like --gpus 2xA100-40G.",
        )
    gpu = gpu_named(name)
    if not gpu.probes:
        raise BadInput(
            f"{gpu.name} is not an NVIDIA GPU, and only those are emulated.",
            way_out="`autotune show gpus` lists them.",
        )
    card = EmulatedCard(gpu=gpu)
    return EmulatedMachine(cards=(card,) * count, lag=lag)
