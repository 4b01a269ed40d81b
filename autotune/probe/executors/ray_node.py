"""Part of a slot on one node of a Ray cluster, without Ray: a local slot with JSON messages."""

from __future__ import annotations

import os
import platform
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

import autotune
from autotune.core.errors import AutotuneError, TrainingEnvironmentError
from autotune.core.files import read_by_threads
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate
from autotune.machine import hardware_detection
from autotune.machine.host_memory import machine_memory_bytes
from autotune.probe.executors.local import LocalSlot
from autotune.probe.executors.local_places import SlotPlace, available_cores, shares_of
from autotune.probe.executors.ray_plan import Node
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RankSpan, RunnerSettings


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return next(filter(str.strip, lines), type(error).__name__)


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
