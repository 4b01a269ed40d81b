"""What runs on a cluster's node: a seat like any local one, spoken to in JSON. It knows nothing of the cluster's own library."""

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
from autotune import detect
from autotune.candidate import Candidate
from autotune.decoding import read_by_threads
from autotune.errors import AutotuneError, RigError, TrainingEnvironmentError
from autotune.executors.cluster import Node
from autotune.executors.grouping import shares_of
from autotune.executors.here import cores_here
from autotune.executors.seat import Place, Seat, Setting
from autotune.hardware import DeviceKind
from autotune.measurement import Measurement
from autotune.rig.keeper import Span
from autotune.rig.process_rig import Requests
from autotune.trainers.base import ProbePlan

OF_TRAINING = (
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
"""What the driver's environment says about training goes for its probes on every node."""


@read_by_threads
class Seating(msgspec.Struct, frozen=True, kw_only=True):
    """How a seat is made, in what JSON knows."""

    python: str
    adapter: str
    ranks: int
    limit_bytes: int
    device_kind: DeviceKind
    devices: int | None
    supported: Mapping[str, tuple[str, str]]
    scratch_root: str | None
    environment: Mapping[str, str]
    share: tuple[int, int] | None
    """Of the node's cores this one of so many shares; None for all of them."""


@read_by_threads
class Ordered(msgspec.Struct, frozen=True, kw_only=True):
    """One probe, worded by the driver."""

    knobs: Mapping[str, Any]
    settings: Mapping[str, Any]
    load: Mapping[str, Any]
    plan: ProbePlan
    load_request: Mapping[str, Any]
    probe_request: Mapping[str, Any]
    span: Span | None = None
    """Where these ranks stand among those of other nodes; None where there are no others."""


@read_by_threads
class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement, or what stood in its place."""

    measurement: Measurement | None = None
    loads: int = 0
    fault: str | None = None
    environment: str | None = None
    """What is wrong with the interpreter there."""


def environment_to_send(ours: Mapping[str, str] = os.environ) -> dict[str, str]:
    return {name: value for name, value in ours.items() if name.startswith(OF_TRAINING)}


def look() -> bytes:
    """The machine that this runs on, for `Node`; what the cluster says of it is filled in by who asked."""
    devices = detect.gpus_here()
    named = tuple(known.name if (known := detect.recognise(device)) else device.name for device in devices)
    node = Node(
        id="", host=platform.node(), cpus=0, gpus=0, cores=tuple(cores_here()), memory_bytes=detect.machine_memory_bytes(),
        processor=detect.processor(), devices=named, version=autotune.__version__,
    )  # fmt: skip
    return msgspec.json.encode(node)


class NodeSeat:
    """One slot's part on one node."""

    def __init__(self, seating: bytes) -> None:
        told = msgspec.json.decode(seating, type=Seating)
        for name in [name for name in os.environ if name.startswith(OF_TRAINING)]:
            del os.environ[name]  # clusters set OMP_NUM_THREADS, for one, where a training would not
        os.environ.update(told.environment)
        setting = Setting(
            python=Path(told.python), adapter=told.adapter, ranks=told.ranks, limit_bytes=told.limit_bytes,
            device_kind=told.device_kind, supported=dict(told.supported), devices=told.devices,
            scratch_root=None if told.scratch_root is None else Path(told.scratch_root),
        )  # fmt: skip
        place = Place(words=platform.node(), cores=_share(told.share))
        self._loads, self._ordered = (
            0,
            Ordered(knobs={}, settings={}, load={}, plan=ProbePlan(), load_request={}, probe_request={}),
        )
        requests = Requests(load=lambda _: self._ordered.load_request, probe=lambda *_: self._ordered.probe_request)
        self._seat = Seat(setting, place, requests, self._count)
        self._closing = threading.Lock()

    def prepare(self) -> bytes:
        """Versions by package, and an address at which a first rank could be met."""
        try:
            versions = dict(self._seat.prepare())
        except TrainingEnvironmentError as error:
            return msgspec.json.encode({"error": f"{platform.node()}: {error}"})
        return msgspec.json.encode({"versions": versions, "host": platform.node()})

    def meeting_point(self) -> tuple[str, int]:
        """Where ranks of several nodes find each other, were the first of them here."""
        with socket.socket() as listener:
            listener.bind(("", 0))
            port = int(listener.getsockname()[1])
        return _own_address(), port

    def measure(self, ordered: bytes) -> bytes:
        self._ordered = msgspec.json.decode(ordered, type=Ordered)
        told, before = self._ordered, self._loads
        candidate = Candidate(knobs=told.knobs, settings=told.settings, load=told.load)
        try:
            self._seat.span(told.span)
            found = Reply(measurement=self._seat.open(candidate).measure(candidate, told.plan), loads=self._loads - before)
        except TrainingEnvironmentError as error:
            found = Reply(environment=f"{platform.node()}: {error}")
        except (RigError, AutotuneError) as fault:
            found = Reply(fault=str(fault), loads=self._loads - before)
        return msgspec.json.encode(found)

    def unload(self) -> None:
        self._seat.unload()

    def interrupt(self) -> None:
        self._seat.interrupt()

    def close(self) -> None:
        """Asked twice, the second answer waits for the first one's work: after it this process may be ended at any moment."""
        with self._closing:
            self._seat.close()

    def _count(self) -> None:
        self._loads += 1


def _share(share: tuple[int, int] | None) -> frozenset[int] | None:
    if share is None or share[1] <= 1:
        return None
    return shares_of(cores_here(), share[1])[share[0]]


def _own_address() -> str:
    """The address by which other machines reach this one; nothing is sent to find out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # of a range that is in no network
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
