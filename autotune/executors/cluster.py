"""What a cluster has for a job, and how its slots are cut: pure, over facts that its nodes told about themselves.

Nodes are taken only where they are alike, as speeds of one study are compared. What a cluster lacks is said at once: what
was asked for, what it has, and the way out.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from autotune.decoding import read_by_threads
from autotune.errors import BadInput, HardwareNotHere
from autotune.hardware import Hardware
from autotune.units import format_bytes

KNOCK_SECONDS = 10.0


@read_by_threads
class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One node, in its own words."""

    id: str
    host: str
    """The machine's name: two nodes of a test may share one."""

    cpus: int
    """As the cluster lets out, which need not be what the machine has."""

    gpus: int
    cores: tuple[int, ...] = ()
    """Those that processes there may use, neighbours beside each other."""

    memory_bytes: int = 0
    processor: str = ""
    devices: tuple[str, ...] = ()
    """Its GPUs by the catalogue's names."""

    version: str = ""
    """Of autotune there."""

    @property
    def kind(self) -> tuple[str, ...]:
        """What must be alike for speeds to be compared; GPUs beside a processor matter more than it does."""
        return self.devices or (self.processor, str(len(self.cores)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How slots are cut out of the cluster."""

    nodes: tuple[Node, ...]
    """Any of these will do for a bundle."""

    slots: int
    bundle: Mapping[str, float]
    """What one node gives to one slot."""

    ranks: tuple[int, ...]
    """How many ranks run on each of the slot's nodes; one number where it is packed on one."""

    per_node: int
    """So many slots share a node at most."""

    notes: tuple[str, ...] = ()

    @property
    def spans(self) -> bool:
        return len(self.ranks) > 1


def plan(nodes: Sequence[Node], hardware: Hardware, limit_bytes: int, slots: int | None) -> Plan:
    """As many slots as were asked for, or as there is room for. BadInput where there is none."""
    if not nodes:
        raise BadInput("The Ray cluster has no node that is alive.", way_out="Start one with `ray start`, and see `ray status`.")
    return (_on_gpus if hardware.kind == "cuda" else _on_cpus)(nodes, hardware, limit_bytes, slots)


def _on_gpus(nodes: Sequence[Node], hardware: Hardware, limit_bytes: int, slots: int | None) -> Plan:
    alike = [node for node in nodes if node.devices and set(node.devices) == {hardware.name} and node.gpus]
    size = hardware.count
    whole = [node for node in alike if node.gpus >= size]
    room = sum(node.gpus // size for node in whole)
    if room:
        return Plan(
            nodes=tuple(whole), slots=_as_many(slots, room, hardware, nodes), bundle={"GPU": size, "CPU": 1}, ranks=(size,),
            per_node=max(node.gpus // size for node in whole), notes=_left_out(nodes, alike, hardware),
        )  # fmt: skip
    ways = [(each, [node for node in alike if node.gpus >= each]) for each in range(size - 1, 0, -1) if size % each == 0]
    for each, enough in ways:
        room = sum(node.gpus // each for node in enough) // (size // each) if len(enough) >= size // each else 0
        if room:
            room = len(enough) // (size // each)  # each of a slot's nodes is another one, and no two slots share one
            return Plan(
                nodes=tuple(enough), slots=_as_many(slots, room, hardware, nodes), bundle={"GPU": each, "CPU": 1},
                ranks=(each,) * (size // each), per_node=1, notes=_left_out(nodes, alike, hardware),
            )  # fmt: skip
    raise HardwareNotHere(
        f"{hardware} was asked for, and the cluster has {in_words(nodes)}.",
        way_out="Name what it has with --gpus, or start nodes that have them.",
    )


def _on_cpus(nodes: Sequence[Node], hardware: Hardware, limit_bytes: int, slots: int | None) -> Plan:
    alike = _largest_kind([node for node in nodes if node.memory_bytes >= limit_bytes and node.cpus])
    if not alike:
        raise HardwareNotHere(
            f"A probe may use {format_bytes(limit_bytes)}, and no node has as much: the cluster has {in_words(nodes)}.",
            way_out="Give a smaller --memory-limit.",
        )
    size = hardware.count
    enough = [node for node in alike if node.cpus >= size]
    if not enough:
        return _spread_over_cpus(nodes, alike, hardware, slots)
    wanted = slots or len(enough)
    per_node = -(-wanted // len(enough))
    room = sum(min(node.cpus // size, node.memory_bytes // limit_bytes, len(node.cores)) for node in enough)
    _as_many(wanted, room, hardware, nodes)
    cpus = min(node.cpus for node in enough) // per_node
    return Plan(
        nodes=tuple(enough), slots=wanted, bundle={"CPU": max(size, cpus)}, ranks=(size,), per_node=per_node,
        notes=_left_out(nodes, alike, hardware),
    )  # fmt: skip


def _spread_over_cpus(nodes: Sequence[Node], alike: Sequence[Node], hardware: Hardware, slots: int | None) -> Plan:
    size = hardware.count
    for each in range(size - 1, 0, -1):
        enough = [node for node in alike if node.cpus >= each]
        room = len(enough) // (size // each) if size % each == 0 else 0
        if room:
            return Plan(
                nodes=tuple(enough), slots=_as_many(slots, room, hardware, nodes), bundle={"CPU": each},
                ranks=(each,) * (size // each), per_node=1, notes=_left_out(nodes, alike, hardware),
            )  # fmt: skip
    raise HardwareNotHere(
        f"{hardware} was asked for, and the cluster has {in_words(nodes)}.", way_out="Ask for fewer ranks, or start more nodes."
    )


def _as_many(slots: int | None, room: int, hardware: Hardware, nodes: Sequence[Node]) -> int:
    if slots is not None and slots > room:
        raise BadInput(
            f"{slots} slots of {hardware} were asked for, and the cluster has room for {room}: it has {in_words(nodes)}.",
            way_out=f"Ask for at most --slots {room}, or start more nodes." if room else "Start more nodes.",
        )
    return slots or room


def _largest_kind(nodes: Sequence[Node]) -> list[Node]:
    kinds: dict[tuple[str, ...], list[Node]] = {}
    for node in nodes:
        kinds.setdefault(node.kind, []).append(node)
    return max(kinds.values(), key=len, default=[])


def _left_out(nodes: Sequence[Node], alike: Sequence[Node], hardware: Hardware) -> tuple[str, ...]:
    """Speeds of unlike machines are not comparable, so a study keeps to one kind, and says so."""
    others = [node for node in nodes if node not in alike and (hardware.kind == "cpu" or node.gpus)]
    if not others:
        return ()
    return (f"Probes keep to nodes that are alike: {in_words(others)} is left out.",)


def in_words(nodes: Sequence[Node]) -> str:
    """`2 nodes of 8 A100-40G; 1 node of 16 CPUs and 64 GiB`."""
    kinds: dict[str, int] = {}
    for node in nodes:
        name = node.devices[0] if node.devices and len(set(node.devices)) == 1 else " and ".join(sorted(set(node.devices)))
        has = f"{node.gpus} {name or 'GPUs of an unknown kind'}" if node.gpus else f"{node.cpus} CPUs and {_memory(node)}"
        kinds[has] = kinds.get(has, 0) + 1
    return "; ".join(f"{count} node{'s' if count > 1 else ''} of {has}" for has, count in kinds.items())


def _memory(node: Node) -> str:
    return format_bytes(node.memory_bytes) if node.memory_bytes else "memory that nobody told"


def differences(told: Sequence[Mapping[str, str]]) -> str:
    """The packages of which nodes have different versions."""
    names = sorted({name for versions in told for name in versions})
    return ", ".join(name for name in names if len({versions.get(name) for versions in told}) > 1)


def first_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def knock(address: str | None) -> None:
    """ConnectionError at once where nobody listens: Ray itself would try for the better part of a minute."""
    host, separator, port = (address or "").rpartition(":")
    if separator and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=KNOCK_SECONDS).close()
