"""Parts of the Ray executor without Ray: division of a cluster's nodes into slots, and a node's
local slot with JSON messages.

The division is made of the facts that the nodes report. Only equal nodes are used, because the
speeds of one study are compared. A request that does not fit fails at once, with the amounts
requested and present.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

import autotune
from autotune.core.errors import AutotuneError, BadInput, HardwareNotHere, TrainingEnvironmentError
from autotune.core.files import read_by_threads
from autotune.core.job import Hardware
from autotune.core.measurement import (
    Cost,
    DeviceMemory,
    Measurement,
    Memory,
    ModelMemory,
    Outcome,
    ProbePlan,
    Speed,
    highest_by_phase,
)
from autotune.core.space import Candidate
from autotune.core.units import counted, format_bytes
from autotune.machine import hardware_detection
from autotune.machine.host_memory import machine_memory_bytes
from autotune.probe.executors.local import LocalSlot, SlotPlace, available_cores, shares_of
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RankSpan, RunnerSettings


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


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return next(filter(str.strip, lines), type(error).__name__)


def merged(parts: Sequence[Measurement]) -> Measurement:
    """Merge the parts: the worst of what limits, the sum of what was trained, the root failure."""
    root = min(parts, key=_blame_order)
    costs = []
    memories = []
    caveats: list[str] = []
    for part in parts:
        costs.append(part.cost)
        memories.append(part.memory)
        caveats += part.caveats
    return replace(
        root,
        memory=_merged_memory(root.memory, memories),
        worst=_merged_speed([part.worst for part in parts]),
        typical=_merged_speed([part.typical for part in parts]),
        cost=_merged_cost(costs),
        optimizer_steps=min(part.optimizer_steps for part in parts),
        caveats=tuple(dict.fromkeys(caveats)),
    )


def _merged_cost(costs: Sequence[Cost]) -> Cost:
    """Return the slowest node's cost with the longest load. Device seconds: the sum, if known."""
    device_seconds: float | None = 0.0
    for cost in costs:
        if cost.device_seconds is None or device_seconds is None:
            device_seconds = None
        else:
            device_seconds += cost.device_seconds
    return replace(
        max(costs, key=lambda cost: cost.total_seconds),
        load_seconds=max(cost.load_seconds for cost in costs),
        device_seconds=device_seconds,
    )


def _merged_memory(of_root: Memory, memories: Sequence[Memory]) -> Memory:
    # The fullest node's memory: each node has a limit of its own.
    fullest = max(
        (memory for memory in memories if memory.peak_bytes is not None),
        key=lambda memory: memory.peak_bytes or 0,
        default=of_root,
    )
    devices: list[DeviceMemory] = []
    models: list[ModelMemory] = []
    for memory in memories:
        devices += memory.devices
        models += memory.models
    return replace(
        fullest,
        phase_peak_bytes=highest_by_phase(memories),
        devices=tuple(devices),
        models=tuple(sorted(models, key=lambda model: model.rank)),
    )


def _blame_order(part: Measurement) -> int:
    """Sort key: out of memory first, then an end from outside, because its peers then report a
    lost rank or time out.
    """
    if part.outcome.is_out_of_memory:
        return 0
    if part.ended_from_outside:
        return 1
    return {Outcome.TIMEOUT: 3, Outcome.OK: 4}.get(part.outcome, 2)


def _merged_speed(speeds: Sequence[Speed | None]) -> Speed | None:
    """Merge the speeds: cycle seconds = max over nodes. None where a node has none."""
    reported = [speed for speed in speeds if speed is not None]
    cycle_counts = {len(speed.cycle_seconds) for speed in reported}
    if len(reported) < len(speeds) or len(cycle_counts) != 1:
        return None
    seconds_by_cycle = zip(*(speed.cycle_seconds for speed in reported), strict=True)
    tokens_by_cycle = zip(*(speed.cycle_loss_tokens for speed in reported), strict=True)
    return replace(
        max(reported, key=lambda speed: sum(speed.cycle_seconds)),
        cycle_seconds=tuple(map(max, seconds_by_cycle)),
        cycle_loss_tokens=tuple(map(sum, tokens_by_cycle)),
        prompt_tokens=sum(speed.prompt_tokens for speed in reported),
        cut_short=any(speed.cut_short for speed in reported),
    )


# Time without a connection after which the head counts as lost: less than Ray's own minute.
LOST_SECONDS = 25.0
NODE_SAMPLE_SECONDS = 2.0
NODE_CONNECT_SECONDS = 2.0


class HeadWatch:
    """Connections to a cluster's head, at most one each INTERVAL_SECONDS. For several threads.
    Ray ends a driver process by itself, without an exception, when the head has been gone for a
    minute (`gcs_rpc_server_reconnect_timeout_s`). The head is therefore watched from here, so
    that the search ends before that, with its answer.
    """

    def __init__(self, address: str, now: Callable[[], float] = time.monotonic) -> None:
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._now = now
        self._tried_at = self._reached_at = now()

    def is_lost(self) -> bool:
        """Return True if no connection succeeded for LOST_SECONDS."""
        now = self._now()
        if now - self._tried_at >= NODE_SAMPLE_SECONDS:
            self.answers()
        return self._now() - self._reached_at > LOST_SECONDS

    def answers(self) -> bool:
        """Return True if a connection succeeds now."""
        self._tried_at = self._now()
        with contextlib.suppress(OSError):
            socket.create_connection(self._place, timeout=NODE_CONNECT_SECONDS).close()
            self._reached_at = self._now()
            return True
        return False

    def wait(self) -> bool:
        """Return True once a connection succeeds; False when the head counts as lost."""
        while not self.is_lost():
            if self._reached_at >= self._tried_at:
                return True
            time.sleep(NODE_SAMPLE_SECONDS / 4)
        return False


# Prefixes of the driver's environment variables that apply to its probes on every node.
TRAINING_VARIABLES = tuple(
    """
    HF_ HUGGINGFACE_ TRANSFORMERS_ VLLM_ NCCL_ TORCH PYTORCH_ OMP_ MKL_ TOKENIZERS_ CUDA_HOME
    """.split()
)


@read_by_threads
class SlotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a slot's part on a node."""

    runner: RunnerSettings
    environment: Mapping[str, str]

    share: tuple[int, int]
    """(index, count): the index-th of `count` equal shares of the node's cores."""


@read_by_threads
class ProbeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A probe, with the requests that the driver built."""

    candidate: Candidate
    plan: ProbePlan
    load_request: Mapping[str, Any]
    probe_request: Mapping[str, Any]

    span: RankSpan | None = None
    """Position of these ranks among those of other nodes; None where there are no others."""


@read_by_threads
class NodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement, or the error in its place."""

    measurement: Measurement | None = None
    loads: int = 0
    fault: str | None = None
    environment: str | None = None  # Error of the node's training environment


def encoded(message: object) -> bytes:
    """Encode a message; paths and read-only mappings become plain JSON."""
    return msgspec.json.encode(message, enc_hook=_plain)


def _plain(value: Any) -> object:
    return str(value) if isinstance(value, Path) else dict(value)


def environment_to_send() -> dict[str, str]:
    names = [name for name in os.environ if name.startswith(TRAINING_VARIABLES)]
    return {name: os.environ[name] for name in names}


def inspect_node() -> bytes:
    """Describe this machine as a `Node`; the caller adds the cluster's figures."""
    names = []
    for device in hardware_detection.gpus_here():
        gpu = hardware_detection.recognise(device)
        names.append(device.name if gpu is None else gpu.name)
    node = Node(
        id="",
        host=platform.node(),
        cpus=0,
        gpus=0,
        cores=tuple(available_cores()),
        processor=hardware_detection.processor(),
        memory_bytes=machine_memory_bytes(),
        devices=tuple(names),
        version=autotune.__version__,
    )
    return msgspec.json.encode(node)


class NodeSlot:
    """Actor: part of a slot on one node."""

    def __init__(self, encoded_settings: bytes) -> None:
        settings = msgspec.json.decode(
            encoded_settings, type=SlotSettings, dec_hook=lambda kind, value: kind(value)
        )
        # Clusters set OMP_NUM_THREADS and others, which a real training would not have.
        for name in environment_to_send():
            del os.environ[name]
        os.environ.update(settings.environment)
        index, count = settings.share
        cores = shares_of(available_cores(), count)[index] if count > 1 else None
        self._order: ProbeOrder
        requests = RequestBuilders(
            load=lambda _: self._order.load_request, probe=lambda *_: self._order.probe_request
        )
        self._slot = LocalSlot(
            settings.runner, SlotPlace(label=platform.node(), cores=cores), requests
        )
        self._closing = threading.Lock()

    def prepare(self) -> bytes:
        """Return the versions by package, or the environment's error."""
        try:
            versions = dict(self._slot.prepare())
        except TrainingEnvironmentError as error:
            return msgspec.json.encode({"error": f"{platform.node()}: {error}"})
        return msgspec.json.encode({"versions": versions, "host": platform.node()})

    def meeting_point(self) -> tuple[str, int]:
        """Return a rendezvous address for ranks on several nodes, the first of them here."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = int(listener.getsockname()[1])
        # The address by which other machines reach this one; sends no packet.
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(("192.0.2.1", 9))  # TEST-NET-1: reserved for documentation
                return str(probe.getsockname()[0]), port
            except OSError:
                return "127.0.0.1", port

    def measure(self, encoded_order: bytes) -> bytes:
        self._order = order = msgspec.json.decode(encoded_order, type=ProbeOrder)
        before = self._slot.worker.loads
        try:
            self._slot.worker.span = order.span
            measurement = self._slot.open(order.candidate).measure(order.candidate, order.plan)
            reply = NodeReply(measurement=measurement, loads=self._slot.worker.loads - before)
        except TrainingEnvironmentError as error:
            reply = NodeReply(environment=f"{platform.node()}: {error}")
        except AutotuneError as fault:
            reply = NodeReply(fault=str(fault), loads=self._slot.worker.loads - before)
        return msgspec.json.encode(reply)

    def unload(self) -> None:
        self._slot.unload()

    def interrupt(self) -> None:
        self._slot.interrupt()

    def close(self) -> None:
        """Close the slot. A second call returns after the first: then this process may be
        killed.
        """
        with self._closing:
            self._slot.close()
