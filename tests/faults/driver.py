"""Driver in a process of its own: real loop, real study, real probes. It records every event at
once.
"""

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

from autotune.core.errors import AutotuneError, BadInput
from autotune.core.events import Event, Note, ProbeEnded, ProbeStarted
from autotune.core.files import write_atomically
from autotune.core.job import Hardware
from autotune.machine.signals import interruptible
from autotune.probe.executors.base import Executor
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.executors.local_places import SlotPlace
from autotune.probe.gpu_set import Gpus
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings
from autotune.report.output_folder import claimed_folder
from autotune.search import loop
from autotune.search.study import open_study
from tests.faults.machine import LIMIT_MIB, Trainer, job
from tests.probe.nvml_playback import Playback
from tests.simulated import MIB

if importlib.util.find_spec("ray"):  # imported once, for every driver that is forked off
    import autotune.probe.executors.ray

FORCED = 99
"""Exit code of a driver that did not close in time after a signal."""

ADAPTER = Path(__file__).parent / "adapter.py"
MARK = "HF_AUTOTUNE_FAULT"
"""Goes into the environment of every process that comes of a run: on a cluster's nodes as well,
as what is for training does.
"""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Parameters of one run of a driver."""

    folder: str
    name: str
    """Path of the file with its events."""

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
    """Path of the file with the device memory (NVML) of a cluster's nodes."""

    gpus: bool = False
    """True: another process takes the recorded GPU after the first probe, until the search
    reports it.
    """


def drive(order: Order) -> None:
    os.environ[MARK] = order.mark
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    plan = replace(loop.SHORT_PROBE, deadline_seconds=order.deadline_seconds)
    loop.SHORT_PROBE = plan  # type: ignore[misc]
    loop.WAIT_SECONDS = 0.1  # type: ignore[misc]
    notebook = Notebook(Path(order.folder) / f"{order.name}.jsonl")
    try:
        with interruptible(lambda: os._exit(FORCED)), claimed_folder(Path(order.folder) / "out"):
            _search(order, notebook)
    except (AutotuneError, BadInput) as error:
        notebook.write(error=type(error).__name__, text=str(error))


class Notebook:
    """A line for whatever happens, there even if this process is gone the next moment."""

    def __init__(self, file: Path) -> None:
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **fields: object) -> None:
        os.write(self._file, json.dumps({**fields, "at": time.monotonic()}).encode() + b"\n")


def _search(order: Order, notebook: Notebook) -> None:
    folder = Path(order.folder)
    search_job, trainer = (
        job(folder, order.storage, resume=order.resume),
        Trainer(folder, order.trouble),
    )
    library = Playback("newcomer")
    executor = _executor(order, search_job.task, trainer, library)
    candidates = loop.legal_candidates(search_job, trainer)
    executor.prepare()
    notebook.write(slots=len(executor.slots))
    study = open_study(search_job, candidates, loop.baseline_candidate(search_job, trainer))
    study.retry.seconds = order.patience_seconds
    visitor = (
        Visitor(Board(Path(order.moment)) if order.address else library) if order.gpus else None
    )

    def listen(event: Event) -> None:
        _write(notebook, event)
        if visitor is not None:
            visitor.hear(event)

    answer = loop.run_search(
        search_job,
        study=study,
        executor=executor,
        listener=listen,
        clock=loop.Clock(search_job.budget_seconds),
    )
    winner = None if answer.winner is None else answer.winner.candidate.id
    notebook.write(
        answer=winner,
        proven=answer.proven,
        interrupted=answer.interrupted,
        fault=answer.fault,
    )


def _write(notebook: Notebook, event: Event) -> None:
    if isinstance(event, Note):
        notebook.write(note=event.text)
    elif isinstance(event, ProbeStarted):
        notebook.write(started=event.number, candidate=event.candidate.id)
    elif isinstance(event, ProbeEnded):
        measurement = event.trial.measurement
        evidence = None if measurement.failure is None else measurement.failure.evidence
        notebook.write(
            ended=event.trial.number,
            outcome=str(measurement.outcome),
            evidence=evidence,
        )


class Board:
    """Writer of the device memory (NVML) that the nodes of a cluster read."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def put(
        self,
        device: int,
        used_mib: int,
        compute: list[dict[str, Any]],
    ) -> None:
        write_atomically(
            self._file,
            json.dumps({"device": device, "used_mib": used_mib, "compute": compute}).encode(),
        )

    def at(self, number: int) -> None:
        assert number == 0
        write_atomically(self._file, json.dumps(None).encode())


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


def _executor(
    order: Order,
    task: Any,
    trainer: Trainer,
    library: Playback,
) -> Executor:
    settings = RunnerSettings(
        python=Path(sys.executable),
        adapter=str(ADAPTER),
        ranks=order.ranks,
        device_kind="cuda" if order.gpus else "cpu",
        limit_bytes=(40960 if order.gpus else _limit_mib(order)) * MIB,
        scratch_root=Path(order.folder) / "scratch",
    )
    requests = RequestBuilders(
        load=lambda candidate: trainer.load_request(candidate, task),
        probe=lambda candidate, plan: trainer.probe_request(candidate, task, plan),
    )
    if order.address is not None:
        cpu = Hardware(
            kind="cpu",
            name="cpu",
            count=order.ranks,
            memory_bytes=_limit_mib(order) * MIB,
            here=True,
        )
        gpu = Hardware(
            kind="cuda",
            name="A100-40G",
            count=1,
            memory_bytes=40960 * MIB,
            here=True,
        )
        hardware = gpu if order.gpus else cpu
        return autotune.probe.executors.ray.RayExecutor(
            settings,
            requests,
            hardware=hardware,
            address=order.address,
            slots=order.slots,
        )
    places = [SlotPlace(label=f"slot {number}") for number in range(order.slots)]
    return LocalExecutor(
        settings, requests, places=places, open_gpus=(lambda: _gpu(library)) if order.gpus else None
    )


def _limit_mib(order: Order) -> int:
    return 1024 if order.ranks > 1 else LIMIT_MIB  # two ranks that have torch


def _gpu(library: Playback) -> Gpus:
    return Gpus(
        1,
        40960 * MIB,
        Path(sys.executable),
        library=library,
        variable=None,
        patience_seconds=0.3,
    )


def as_json(order: Order) -> str:
    return json.dumps(asdict(order))


if __name__ == "__main__":
    drive(Order(**json.loads(sys.argv[1])))
