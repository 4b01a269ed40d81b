"""A driver as a process of its own: the real loop, a real study, real rigs. What it hears it writes down at once."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autotune import tune as loop
from autotune.errors import AutotuneError, BadInput
from autotune.events import Event, Note, ProbeEnded, ProbeStarted
from autotune.executors.base import Executor
from autotune.executors.local import LocalExecutor
from autotune.executors.seat import Place
from autotune.files import put_whole
from autotune.hardware import Hardware
from autotune.rig.gpus import Gpus
from autotune.study import open_study
from tests.faults.machine import LIMIT_MIB, Trainer, question
from tests.rig.nvml_playback import Playback
from tests.simulated import MIB

if importlib.util.find_spec("ray"):  # imported once, for every driver that is forked off
    import autotune.executors.ray

ADAPTER = Path(__file__).parent / "adapter.py"
MARK = "HF_AUTOTUNE_FAULT"
"""Goes into the environment of every process that comes of a run: on a cluster's nodes as well, as what is for training does."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """One run of a driver."""

    folder: str
    name: str
    """Of the file in which it writes down what it hears."""

    storage: str
    mark: str
    address: str | None = None
    """A Ray cluster's; None for this machine."""

    slots: int = 1
    ranks: int = 1
    trouble: Mapping[str, Any] | None = None
    resume: bool = False
    deadline_seconds: float = 30.0
    patience_seconds: float = 30.0
    moment: str = ""
    """The file that tells a cluster's nodes what their GPU shows."""

    gpus: bool = False
    """Whether somebody takes the GPU (of a recording) after the first probe, until the search says so."""


def drive(order: Order) -> None:
    os.environ[MARK] = order.mark
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    loop.SHORT = replace(loop.SHORT, deadline_seconds=order.deadline_seconds)  # type: ignore[misc]
    loop.WAIT_SECONDS = 0.1  # type: ignore[misc]
    notebook = Notebook(Path(order.folder) / f"{order.name}.jsonl")
    try:
        _search(order, notebook)
    except (AutotuneError, BadInput) as error:
        notebook.write(error=type(error).__name__, text=str(error))


class Notebook:
    """A line for whatever happens, there even if this process is gone the next moment."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **what: object) -> None:
        os.write(self._file, json.dumps({**what, "at": time.monotonic()}).encode() + b"\n")


def _search(order: Order, notebook: Notebook) -> None:
    folder = Path(order.folder)
    asked, trainer = question(folder, order.storage, resume=order.resume), Trainer(folder, order.trouble)
    library = Playback("newcomer")
    executor = _executor(order, asked.job, trainer, library)
    candidates = loop.legal_candidates(asked, trainer)
    executor.prepare()
    notebook.write(slots=len(executor.slots))
    study = open_study(asked, candidates, loop.baseline_candidate(asked, trainer))
    study._patience.seconds = order.patience_seconds
    visitor = Visitor(Board(Path(order.moment)) if order.address else library) if order.gpus else None

    def listen(event: Event) -> None:
        _write(notebook, event)
        if visitor is not None:
            visitor.hear(event)

    answer = loop.tune(asked, study=study, executor=executor, listener=listen, clock=loop.Clock(asked.budget_seconds))
    winner = None if answer.winner is None else answer.winner.candidate.id
    notebook.write(answer=winner, proven=answer.proven, interrupted=answer.interrupted)


def _write(notebook: Notebook, event: Event) -> None:
    if isinstance(event, Note):
        notebook.write(note=event.text)
    elif isinstance(event, ProbeStarted):
        notebook.write(started=event.number, candidate=event.candidate.id)
    elif isinstance(event, ProbeEnded):
        found = event.trial.measurement
        evidence = None if found.failure is None else found.failure.evidence
        notebook.write(ended=event.trial.number, outcome=str(found.outcome), evidence=evidence)


class Board:
    """Tells the nodes of a cluster what their GPU shows."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def put(self, device: int, used_mib: int, compute: list[dict[str, Any]]) -> None:
        put_whole(self._file, json.dumps({"device": device, "used_mib": used_mib, "compute": compute}).encode())

    def at(self, number: int) -> None:
        assert number == 0
        put_whole(self._file, json.dumps(None).encode())


class Visitor:
    """Takes the GPU between two probes, and leaves when the search has noticed."""

    def __init__(self, library: Playback | Board) -> None:
        self._library, self._came = library, False

    def hear(self, event: Event) -> None:
        if isinstance(event, ProbeEnded) and not self._came:
            self._came = True
            self._library.put(0, 20484, [{"pid": 9008080, "mib": 20480}])
        elif isinstance(event, Note):
            self._library.at(0)


def _executor(order: Order, job: Any, trainer: Trainer, library: Playback) -> Executor:
    given: dict[str, Any] = {
        "python": Path(sys.executable), "adapter": str(ADAPTER), "ranks": order.ranks,
        "load_request": lambda candidate: trainer.load_request(candidate, job),
        "probe_request": lambda candidate, plan: trainer.probe_request(candidate, job, plan),
        "limit_bytes": (40960 if order.gpus else _limit_mib(order)) * MIB, "scratch_root": Path(order.folder) / "scratch",
    }  # fmt: skip
    if order.address is not None:
        cpu = Hardware(kind="cpu", name="cpu", count=order.ranks, memory_bytes=_limit_mib(order) * MIB, here=True)
        gpu = Hardware(kind="cuda", name="A100-40G", count=1, memory_bytes=40960 * MIB, here=True)
        hardware = gpu if order.gpus else cpu
        return autotune.executors.ray.RayExecutor(
            **given, hardware=hardware, device_kind=hardware.kind, address=order.address, slots=order.slots
        )
    if order.gpus:
        given |= {"device_kind": "cuda", "open_gpus": lambda: _gpu(library)}
    places = [Place(words=f"slot {number}") for number in range(order.slots)]
    return LocalExecutor(**given, places=places)


def _limit_mib(order: Order) -> int:
    return 1024 if order.ranks > 1 else LIMIT_MIB  # two ranks that have torch


def _gpu(library: Playback) -> Gpus:
    return Gpus(1, 40960 * MIB, Path(sys.executable), library=library, variable=None, patience_seconds=0.3)


def as_json(order: Order) -> str:
    return json.dumps(asdict(order))


if __name__ == "__main__":
    drive(Order(**json.loads(sys.argv[1])))
