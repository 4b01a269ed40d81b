"""Division of a cluster's nodes into slots, made of the facts that the nodes report.

Only equal nodes are used, because the speeds of one study are compared. A request that does not fit
fails at once, with the amounts requested and present.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from autotune.core.errors import BadInput, HardwareNotHere
from autotune.core.files import read_by_threads
from autotune.core.job import Hardware
from autotune.core.units import counted, format_bytes


@read_by_threads
class Node(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    host: str  # Machine name; nodes of a test may share one
    cpus: int  # CPUs that the cluster offers, which may differ from the machine's
    gpus: int
    cores: tuple[int, ...] = ()  # Usable cores, neighbours next to each other
    memory_bytes: int = 0
    processor: str = ""
    devices: tuple[str, ...] = ()  # GPUs, by the catalogue's names
    version: str = ""  # Version of autotune

    @property
    def kind(self) -> tuple[str, ...]:
        """Key of nodes with comparable speeds: the GPUs, or the processor where there are none."""
        return self.devices or (self.processor, str(len(self.cores)))

    def devices_of(self, hardware: Hardware) -> int:
        return self.gpus if hardware.kind == "cuda" else self.cpus


@dataclass(frozen=True, kw_only=True)
class Plan:
    nodes: tuple[Node, ...]  # Nodes of which any can hold a bundle
    slots: int
    bundle: Mapping[str, float]  # Ray resources of one node for one slot
    ranks: tuple[int, ...]  # Ranks on each node of a slot; one entry for a slot on one node
    per_node: int  # Maximum number of slots on one node
    notes: tuple[str, ...] = ()

    @property
    def spans(self) -> bool:
        return len(self.ranks) > 1


def plan(
    nodes: Sequence[Node],
    hardware: Hardware,
    limit_bytes: int,
    slots: int | None,
) -> Plan:
    """Return as many slots as requested, or as fit. Raises BadInput where none fits."""
    if not nodes:
        raise BadInput(
            "The Ray cluster has no node that is alive.",
            way_out="Start one with `ray start`, and see `ray status`.",
        )
    # 1. Nodes of one kind.
    on_gpus = hardware.kind == "cuda"
    size = hardware.count
    candidates = nodes
    if on_gpus:
        candidates = [node for node in nodes if node.gpus]
        alike = [node for node in candidates if set(node.devices) == {hardware.name}]
    else:
        alike = _alike_by_processor(nodes, limit_bytes)
    left_out = [node for node in candidates if node not in alike]
    notes: tuple[str, ...] = ()
    if left_out:
        notes = (f"Probes use nodes of one kind: {in_words(left_out)} is left out.",)

    # 2. Slots on one node each.
    large = [node for node in alike if node.devices_of(hardware) >= size]
    if large and on_gpus:
        slots_per_node = [node.gpus // size for node in large]
        return Plan(
            nodes=tuple(large),
            slots=_checked(slots, sum(slots_per_node), hardware, nodes),
            bundle={"GPU": size, "CPU": 1},
            ranks=(size,),
            per_node=max(slots_per_node),
            notes=notes,
        )
    if large:
        room = 0
        least_cpus = large[0].cpus
        for node in large:
            room += _slots_by_memory(node, size, limit_bytes)
            least_cpus = min(least_cpus, node.cpus)
        count = _checked(slots or len(large), room, hardware, nodes)
        per_node = math.ceil(count / len(large))
        cpus = least_cpus // per_node
        return Plan(
            nodes=tuple(large),
            slots=count,
            bundle={"CPU": max(size, cpus)},
            ranks=(size,),
            per_node=per_node,
            notes=notes,
        )

    # 3. Slots over several nodes: most ranks per node in equal parts, no node in two slots.
    for ranks in range(size - 1, 0, -1):
        enough = [node for node in alike if node.devices_of(hardware) >= ranks]
        room = len(enough) // (size // ranks)
        if size % ranks == 0 and room:
            bundle = {"CPU": ranks}
            if on_gpus:
                bundle = {"GPU": ranks, "CPU": 1}
            return Plan(
                nodes=tuple(enough),
                slots=_checked(slots, room, hardware, nodes),
                bundle=bundle,
                ranks=(ranks,) * (size // ranks),
                per_node=1,
                notes=notes,
            )
    way_out = "Use fewer ranks, or start more nodes."
    if on_gpus:
        way_out = "Name what it has with --gpus, or start nodes that have them."
    raise HardwareNotHere(
        f"{hardware} was requested, and the cluster has {in_words(nodes)}.", way_out=way_out
    )


def _alike_by_processor(nodes: Sequence[Node], limit_bytes: int) -> list[Node]:
    """Return the nodes of the most frequent kind that have memory for a probe."""
    able = [node for node in nodes if node.memory_bytes >= limit_bytes and node.cpus]
    if not able:
        raise HardwareNotHere(
            f"A probe may use {format_bytes(limit_bytes)}, and no node has as much: the cluster"
            f" has {in_words(nodes)}.",
            way_out="Give a smaller --memory-limit.",
        )
    [(kind, _)] = Counter(node.kind for node in able).most_common(1)
    return [node for node in able if node.kind == kind]


def _slots_by_memory(
    node: Node,
    size: int,
    limit_bytes: int,
) -> int:
    return min(node.cpus // size, node.memory_bytes // limit_bytes, len(node.cores))


def _checked(
    slots: int | None,
    room: int,
    hardware: Hardware,
    nodes: Sequence[Node],
) -> int:
    """Return the number of slots, if there is room for it."""
    if slots is not None and slots > room:
        way_out = "Start more nodes."
        if room:
            way_out = f"Use at most --slots {room}, or start more nodes."
        raise BadInput(
            f"{slots} slots of {hardware} were requested, and the cluster has room for {room}: it"
            f" has {in_words(nodes)}.",
            way_out=way_out,
        )
    return slots or room


def in_words(nodes: Sequence[Node]) -> str:
    """Return display text: `2 nodes of 8 A100-40G; 1 node of 16 CPUs and 64 GiB`."""
    kinds = Counter(map(_described, nodes))
    return "; ".join(f"{counted(count, 'node')} of {kind}" for kind, count in kinds.items())


def _described(node: Node) -> str:
    if node.gpus:
        names = " and ".join(sorted(set(node.devices)))
        return f"{node.gpus} {names or 'GPUs of an unknown kind'}"
    memory = format_bytes(node.memory_bytes) if node.memory_bytes else "unknown memory"
    return f"{node.cpus} CPUs and {memory}"
