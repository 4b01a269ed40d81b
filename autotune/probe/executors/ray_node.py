"""Part of the Ray executor on a node: a local slot with JSON messages. Imports no Ray."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

import autotune
from autotune.core.errors import AutotuneError, TrainingEnvironmentError
from autotune.core.files import read_by_threads
from autotune.core.measurement import Measurement, ProbePlan
from autotune.core.space import Candidate
from autotune.machine import hardware_detection
from autotune.probe.executors.cluster_plan import Node
from autotune.probe.executors.local_slots import LocalSlot, SlotPlace, available_cores, shares_of
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RankSpan, RunnerSettings

LOST_SECONDS = 25.0  # Time without a connection after which the head counts as lost: less than Ray's own minute
INTERVAL_SECONDS = 2.0
CONNECT_SECONDS = 2.0


class HeadWatch:
    """Connections to a cluster's head, at most one each INTERVAL_SECONDS. For several threads. Ray ends a driver process by
    itself, without an exception, when the head has been gone for a minute (`gcs_rpc_server_reconnect_timeout_s`). The head is
    therefore watched from here, so that the search ends before that, with its answer."""

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
    "HF_", "HUGGINGFACE_", "TRANSFORMERS_", "VLLM_", "NCCL_", "TORCH", "PYTORCH_", "OMP_", "MKL_", "TOKENIZERS_", "CUDA_HOME",
)  # fmt: skip
"""Prefixes of the driver's environment variables that apply to its probes on every node."""


@read_by_threads
class SlotSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of a slot's part on a node."""

    runner: RunnerSettings
    environment: Mapping[str, str]
    share: tuple[int, int]  # (index, count): the index-th of `count` equal shares of the node's cores


@read_by_threads
class ProbeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A probe, with the requests that the driver built."""

    candidate: Candidate
    plan: ProbePlan
    load_request: Mapping[str, Any]
    probe_request: Mapping[str, Any]
    span: RankSpan | None = None  # Position of these ranks among those of other nodes; None where there are no others


@read_by_threads
class NodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement, or the error in its place."""

    measurement: Measurement | None = None
    loads: int = 0
    fault: str | None = None
    environment: str | None = None  # Error of the node's training environment


def encoded(message: object) -> bytes:
    """Encode a message; paths and read-only mappings become plain JSON."""
    return msgspec.json.encode(message, enc_hook=lambda value: str(value) if isinstance(value, Path) else dict(value))


def environment_to_send() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(TRAINING_VARIABLES)}


def inspect_node() -> bytes:
    """Describe this machine as a `Node`; the caller adds the cluster's figures."""
    devices = hardware_detection.gpus_here()
    named = tuple(known.name if (known := hardware_detection.recognise(device)) else device.name for device in devices)
    node = Node(
        id="", host=platform.node(), cpus=0, gpus=0, cores=tuple(available_cores()), processor=hardware_detection.processor(),
        memory_bytes=hardware_detection.machine_memory_bytes(), devices=named, version=autotune.__version__,
    )  # fmt: skip
    return msgspec.json.encode(node)


class NodeSlot:
    """Actor: part of a slot on one node."""

    def __init__(self, encoded_settings: bytes) -> None:
        settings = msgspec.json.decode(encoded_settings, type=SlotSettings, dec_hook=lambda kind, value: kind(value))
        for name in environment_to_send():
            del os.environ[name]  # clusters set OMP_NUM_THREADS and others, which a real training would not have
        os.environ.update(settings.environment)
        index, count = settings.share
        cores = shares_of(available_cores(), count)[index] if count > 1 else None
        self._order: ProbeOrder
        requests = RequestBuilders(load=lambda _: self._order.load_request, probe=lambda *_: self._order.probe_request)
        self._slot = LocalSlot(settings.runner, SlotPlace(words=platform.node(), cores=cores), requests)
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
        before = self._slot.loads
        try:
            self._slot.worker.span = order.span
            measurement = self._slot.open(order.candidate).measure(order.candidate, order.plan)
            reply = NodeReply(measurement=measurement, loads=self._slot.loads - before)
        except TrainingEnvironmentError as error:
            reply = NodeReply(environment=f"{platform.node()}: {error}")
        except AutotuneError as fault:
            reply = NodeReply(fault=str(fault), loads=self._slot.loads - before)
        return msgspec.json.encode(reply)

    def unload(self) -> None:
        self._slot.unload()

    def interrupt(self) -> None:
        self._slot.interrupt()

    def close(self) -> None:
        """Close the slot. A second call returns after the first: then this process may be killed."""
        with self._closing:
            self._slot.close()
