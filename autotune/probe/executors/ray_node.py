"""Parts of the Ray executor without Ray: division of a cluster's nodes into slots, and a node's
local slot with JSON messages.

The division is made of the facts that the nodes report. Only equal nodes are used, because the
speeds of one study are compared. A request that does not fit fails at once, with the amounts
requested and present.
"""

from __future__ import annotations

import contextlib
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
from autotune.core.measurement import Measurement, Outcome, ProbePlan, Speed, highest_by_phase
from autotune.core.space import Candidate
from autotune.core.units import format_bytes
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


def plan(nodes: Sequence[Node], hardware: Hardware, limit_bytes: int, slots: int | None) -> Plan:
    """Return as many slots as requested, or as fit. Raises BadInput where none fits."""
    if not nodes:
        raise BadInput(
            "The Ray cluster has no node that is alive.",
            way_out="Start one with `ray start`, and see `ray status`.",
        )
    # 1. Nodes of one kind.
    on_gpus, size = hardware.kind == "cuda", hardware.count
    if on_gpus:
        alike = [
            node
            for node in nodes
            if node.devices and set(node.devices) == {hardware.name} and node.gpus
        ]
        others = [node for node in nodes if node not in alike and node.gpus]
    else:
        able = [node for node in nodes if node.memory_bytes >= limit_bytes and node.cpus]
        largest = Counter(node.kind for node in able).most_common(1)
        alike = [node for node in able if node.kind == largest[0][0]]
        others = [node for node in nodes if node not in alike]
        if not alike:
            raise HardwareNotHere(
                f"A probe may use {format_bytes(limit_bytes)}, and no node has as much: the cluster"
                f" has {in_words(nodes)}.",
                way_out="Give a smaller --memory-limit.",
            )
    notes = (f"Probes use nodes of one kind: {in_words(others)} is left out.",) if others else ()
    # 2. Slots on one node each.
    whole = [node for node in alike if (node.gpus if on_gpus else node.cpus) >= size]
    if whole and on_gpus:
        room = sum(node.gpus // size for node in whole)
        return Plan(
            nodes=tuple(whole),
            slots=_checked(slots, room, hardware, nodes),
            bundle={"GPU": size, "CPU": 1},
            ranks=(size,),
            per_node=max(node.gpus // size for node in whole),
            notes=notes,
        )
    if whole:
        room = sum(
            min(node.cpus // size, node.memory_bytes // limit_bytes, len(node.cores))
            for node in whole
        )
        count = _checked(slots or len(whole), room, hardware, nodes)
        per_node = -(-count // len(whole))
        cpus = min(node.cpus for node in whole) // per_node
        return Plan(
            nodes=tuple(whole),
            slots=count,
            bundle={"CPU": max(size, cpus)},
            ranks=(size,),
            per_node=per_node,
            notes=notes,
        )
    # 3. Slots over several nodes: most ranks per node in equal parts, no node in two slots.
    for each in (each for each in range(size - 1, 0, -1) if size % each == 0):
        enough = [node for node in alike if (node.gpus if on_gpus else node.cpus) >= each]
        room = len(enough) // (size // each)
        if room:
            return Plan(
                nodes=tuple(enough),
                slots=_checked(slots, room, hardware, nodes),
                bundle={"GPU": each, "CPU": 1} if on_gpus else {"CPU": each},
                ranks=(each,) * (size // each),
                per_node=1,
                notes=notes,
            )
    way_out = (
        "Name what it has with --gpus, or start nodes that have them."
        if on_gpus
        else "Use fewer ranks, or start more nodes."
    )
    raise HardwareNotHere(
        f"{hardware} was requested, and the cluster has {in_words(nodes)}.", way_out=way_out
    )


def _checked(slots: int | None, room: int, hardware: Hardware, nodes: Sequence[Node]) -> int:
    """Return the number of slots, if there is room for it."""
    if slots is not None and slots > room:
        raise BadInput(
            f"{slots} slots of {hardware} were requested, and the cluster has room for {room}: it"
            f" has {in_words(nodes)}.",
            way_out=(
                f"Use at most --slots {room}, or start more nodes." if room else "Start more nodes."
            ),
        )
    return slots or room


def in_words(nodes: Sequence[Node]) -> str:
    """Return display text: `2 nodes of 8 A100-40G; 1 node of 16 CPUs and 64 GiB`."""
    kinds: Counter[str] = Counter()
    for node in nodes:
        names = " and ".join(sorted(set(node.devices)))
        memory = format_bytes(node.memory_bytes) if node.memory_bytes else "unknown memory"
        kinds[
            (
                f"{node.gpus} {names or 'GPUs of an unknown kind'}"
                if node.gpus
                else f"{node.cpus} CPUs and {memory}"
            )
        ] += 1
    return "; ".join(
        f"{count} node{'s' if count > 1 else ''} of {what}" for what, count in kinds.items()
    )


def first_line(error: BaseException) -> str:
    return next(
        (line for line in str(error).strip().splitlines() if line.strip()), type(error).__name__
    )


def merged(parts: Sequence[Measurement]) -> Measurement:
    """Merge the parts: the worst of what limits, the sum of what was trained, the root failure."""
    first, memories, costs = (
        min(parts, key=_blame_order),
        [part.memory for part in parts],
        [part.cost for part in parts],
    )
    # The fullest node's memory: each node has a limit of its own.
    fullest = max(
        (memory for memory in memories if memory.peak_bytes is not None),
        key=lambda m: m.peak_bytes or 0,
        default=first.memory,
    )
    held = [cost.device_seconds for cost in costs if cost.device_seconds is not None]
    return replace(
        first,
        memory=replace(
            fullest,
            phase_peak_bytes=highest_by_phase(memories),
            devices=tuple(device for memory in memories for device in memory.devices),
            models=tuple(
                sorted(
                    (one for memory in memories for one in memory.models), key=lambda one: one.rank
                )
            ),
        ),
        worst=_merged_speed([part.worst for part in parts]),
        typical=_merged_speed([part.typical for part in parts]),
        cost=replace(
            max(costs, key=lambda cost: cost.total_seconds),
            load_seconds=max(cost.load_seconds for cost in costs),
            device_seconds=sum(held) if len(held) == len(costs) else None,
        ),
        optimizer_steps=min(part.optimizer_steps for part in parts),
        caveats=tuple(dict.fromkeys(words for part in parts for words in part.caveats)),
    )


def _blame_order(part: Measurement) -> int:
    """Sort key: out of memory first, then an end from outside, because its peers then report a
    lost rank or time out.
    """
    outcome = part.outcome
    if outcome.is_out_of_memory or part.ended_from_outside:
        return 0 if outcome.is_out_of_memory else 1
    return 4 if outcome is Outcome.OK else 3 if outcome is Outcome.TIMEOUT else 2


def _merged_speed(speeds: Sequence[Speed | None]) -> Speed | None:
    """Merge the speeds: cycle seconds = max over nodes. None where a node has none."""
    known = [speed for speed in speeds if speed is not None]
    if len(known) < len(speeds) or len({len(speed.cycle_seconds) for speed in known}) != 1:
        return None
    return replace(
        max(known, key=lambda speed: sum(speed.cycle_seconds)),
        cycle_seconds=tuple(map(max, zip(*(speed.cycle_seconds for speed in known), strict=True))),
        cycle_loss_tokens=tuple(
            map(sum, zip(*(speed.cycle_loss_tokens for speed in known), strict=True))
        ),
        prompt_tokens=sum(speed.prompt_tokens for speed in known),
        cut_short=any(speed.cut_short for speed in known),
    )


# Time without a connection after which the head counts as lost: less than Ray's own minute
LOST_SECONDS = 25.0
INTERVAL_SECONDS = 2.0
CONNECT_SECONDS = 2.0


class HeadWatch:
    """Connections to a cluster's head, at most one each INTERVAL_SECONDS. For several threads.
    Ray ends a driver process by itself, without an exception, when the head has been gone for a
    minute (`gcs_rpc_server_reconnect_timeout_s`). The head is therefore watched from here, so
    that the search ends before that, with its answer.
    """

    def __init__(self, address: str, now: Callable[[], float] = time.monotonic) -> None:
        host, _, port = address.rpartition(":")
        self._place, self._now = (host.strip("[]"), int(port)), now
        self._tried_at = self._reached_at = now()

    def is_lost(self) -> bool:
        """Return True if no connection succeeded for LOST_SECONDS."""
        now = self._now()
        if now - self._tried_at >= INTERVAL_SECONDS:
            self.answers()
        return self._now() - self._reached_at > LOST_SECONDS

    def answers(self) -> bool:
        """Return True if a connection succeeds now."""
        self._tried_at = self._now()
        with contextlib.suppress(OSError):
            socket.create_connection(self._place, timeout=CONNECT_SECONDS).close()
            self._reached_at = self._now()
            return True
        return False

    def wait(self) -> bool:
        """Return True once a connection succeeds; False when the head counts as lost."""
        while not self.is_lost():
            if self._reached_at >= self._tried_at:
                return True
            time.sleep(INTERVAL_SECONDS / 4)
        return False


TRAINING_VARIABLES = (
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "VLLM_",
    "NCCL_",
    "TORCH",
    "PYTORCH_",
    "OMP_",
    "MKL_",
    "TOKENIZERS_",
    "CUDA_HOME",
)
"""Prefixes of the driver's environment variables that apply to its probes on every node."""


@read_by_threads
class SlotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a slot's part on a node."""

    runner: RunnerSettings
    environment: Mapping[str, str]
    share: tuple[
        int, int
    ]  # (index, count): the index-th of `count` equal shares of the node's cores


@read_by_threads
class ProbeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A probe, with the requests that the driver built."""

    candidate: Candidate
    plan: ProbePlan
    load_request: Mapping[str, Any]
    probe_request: Mapping[str, Any]
    span: RankSpan | None = (
        None  # Position of these ranks among those of other nodes; None where there are no others
    )


@read_by_threads
class NodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement, or the error in its place."""

    measurement: Measurement | None = None
    loads: int = 0
    fault: str | None = None
    environment: str | None = None  # Error of the node's training environment


def encoded(message: object) -> bytes:
    """Encode a message; paths and read-only mappings become plain JSON."""
    return msgspec.json.encode(
        message, enc_hook=lambda value: str(value) if isinstance(value, Path) else dict(value)
    )


def environment_to_send() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(TRAINING_VARIABLES)
    }


def inspect_node() -> bytes:
    """Describe this machine as a `Node`; the caller adds the cluster's figures."""
    devices = hardware_detection.gpus_here()
    named = tuple(
        known.name if (known := hardware_detection.recognise(device)) else device.name
        for device in devices
    )
    node = Node(
        id="",
        host=platform.node(),
        cpus=0,
        gpus=0,
        cores=tuple(available_cores()),
        processor=hardware_detection.processor(),
        memory_bytes=machine_memory_bytes(),
        devices=named,
        version=autotune.__version__,
    )
    return msgspec.json.encode(node)


class NodeSlot:
    """Actor: part of a slot on one node."""

    def __init__(self, encoded_settings: bytes) -> None:
        settings = msgspec.json.decode(
            encoded_settings, type=SlotSettings, dec_hook=lambda kind, value: kind(value)
        )
        for name in environment_to_send():
            del os.environ[
                name
            ]  # clusters set OMP_NUM_THREADS and others, which a real training would not have
        os.environ.update(settings.environment)
        index, count = settings.share
        cores = shares_of(available_cores(), count)[index] if count > 1 else None
        self._order: ProbeOrder
        requests = RequestBuilders(
            load=lambda _: self._order.load_request, probe=lambda *_: self._order.probe_request
        )
        self._slot = LocalSlot(
            settings.runner, SlotPlace(words=platform.node(), cores=cores), requests
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
