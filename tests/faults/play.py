"""Run and verdict of a fault, at a place, with a seed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.faults import checks
from tests.faults.scene import LONGEST_SECONDS, Scene
from tests.faults.table import FAULTS, ExecutorKind, Fault

ON_NODES = Path(__file__).parent / "on_nodes"
NVML_FILE = "AUTOTUNE_TEST_NVML"
"""Environment variable with the path of the file that the replacement of NVML reads."""

ORPHAN_SECONDS = 10.0
"""Time limit for the exit of the processes of an ended driver."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of one run."""

    wrong: tuple[str, ...]
    """Description of violations; empty where there is none."""

    lost: int
    orphans: int
    seconds: float

    @property
    def survived(self) -> bool:
        return not self.wrong


@dataclass(kw_only=True)
class Stages:
    """Resources that runs share, created at first use: a cluster and a database server."""

    folder: Path
    nodes: int = 0
    """Number of nodes of the cluster, if there is one."""

    cluster: Any = None
    address: str | None = None
    server: Any = None

    @property
    def moment(self) -> Path:
        """Path of the file with the device memory (NVML) of the cluster's nodes."""
        return self.folder / "moment.json"

    def scene(
        self,
        fault: Fault,
        place: ExecutorKind,
        seed: int,
    ) -> Scene:
        random = Random(f"{fault.name} {place} {seed}")
        folder = self.folder / f"{fault.name.replace(' ', '-').replace(chr(39), '')}-{place}-{seed}"
        (folder / "db").mkdir(parents=True)
        on_server = fault.database == "postgres"
        return Scene(
            folder=folder,
            random=random,
            server=self.server,
            cluster=self.cluster,
            storage=self.server.url if on_server else f"sqlite:///{folder}/db/study.db",
            address=self.address if place == "ray" else None,
            ranks=fault.ranks,
            slots=fault.slots or 1 + seed % 2,
            at=random.choice((1, 2, 3)),
            moment=self.moment,
        )


@contextmanager
def stages(
    folder: Path,
    faults: tuple[Fault, ...],
    places: tuple[ExecutorKind, ...],
    jobs: int = 1,
) -> Iterator[Stages]:
    """Create the resources that these faults need, for as many runs beside each other."""
    shared = Stages(folder=folder)
    with contextlib.ExitStack() as stack:
        if any(fault.database == "postgres" for fault in faults):
            from tests.search.postgres import server

            shared.server = stack.enter_context(server())
        if any(
            {"ray"} & set(places) & set(fault.places) and not fault.own_cluster for fault in faults
        ):
            from tests.executors.clusters import cluster

            shared.nodes = max(
                2 * jobs, *(fault.nodes for fault in faults)
            )  # a slot on CPUs takes a whole node
            shared.moment.write_text(json.dumps(None))
            os.environ[NVML_FILE] = str(shared.moment)
            shared.cluster = stack.enter_context(cluster(shared.nodes, gpus=1, in_front=ON_NODES))
            shared.address = shared.cluster.address
        yield shared


def play(
    fault: Fault,
    place: ExecutorKind,
    seed: int,
    shared: Stages,
) -> Found:
    began, scene = time.monotonic(), shared.scene(fault, place, seed)
    with fault.stage(scene):
        wrong, orphans = _first(fault, scene)
        if fault.mend is not None:
            fault.mend(scene)
        faults_of_second, leftover = _second(scene)
        study, states = checks.recorded_trials(scene)
        lost = _lost(scene, study)
        wrong += [*scene.wrong, *faults_of_second, *_judge(fault, scene, study, states), *lost]
    _as_before(shared)
    count = orphans + leftover
    return Found(
        wrong=(*wrong, *([f"{count} processes were left"] if count else [])),
        lost=len(lost),
        orphans=count,
        seconds=time.monotonic() - began,
    )


def play_apart(
    name: str,
    place: ExecutorKind,
    folder: Path,
    address: str | None,
    seed: int,
) -> Found:
    """Run in a process of its own, which shares no more than the cluster with others."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    return play(fault, place, seed, Stages(folder=folder, address=address))


def _first(fault: Fault, scene: Scene) -> tuple[list[str], int]:
    """The driver to which it happens."""
    trouble = None if fault.inside is None else {**fault.inside(scene.random), "at": scene.at}
    driver = scene.start(
        scene.order(
            "first",
            trouble=trouble,
            resume=fault.resumes,
            deadline_seconds=fault.deadline_seconds,
            gpus=fault.gpus,
        )
    )
    if fault.outside is not None:
        fault.outside(scene)
    code = driver.code(LONGEST_SECONDS)
    end = _end(scene, "first", code)
    wrong = (
        []
        if end in fault.ends
        else [f"the driver ended by {end} ({code}): {scene.events('first')[-1:]}"]
    )
    if (
        fault.message is not None
        and end != "killed"
        and not (fault.may_pass_unseen and _unseen(scene))
    ):
        wrong += checks.message_missing(scene.events("first"), fault.message)
    return wrong, _clear(scene)


def _end(
    scene: Scene,
    name: str,
    code: int | None,
) -> str:
    if code is None:
        assert scene.driver is not None
        scene.driver.kill()
        return "hanging"
    ends = []
    for line in scene.events(name):
        for key in ("answer", "error"):
            if key in line:
                ends.append(key)
    return "killed" if code == -signal.SIGKILL else ends[-1] if ends else "nothing"


def _unseen(scene: Scene) -> bool:
    """Return True if the driver noticed no problem."""

    def reports_trouble(line: Mapping[str, object]) -> bool:
        noted = "note" in line and not str(line["note"]).startswith(
            "Measuring one candidate again alone"
        )
        return noted or "error" in line or line.get("outcome", "ok") != "ok"

    return not any(map(reports_trouble, scene.events("first")))


def _second(scene: Scene) -> tuple[list[str], int]:
    """Another driver goes on, with nothing in its way."""
    driver = scene.start(scene.order("second", resume=True))
    code = driver.code(LONGEST_SECONDS)
    end = _end(scene, "second", code)
    return (
        []
        if end == "answer"
        else [f"resuming ended by {end} ({code}): {scene.events('second')[-1:]}"]
    ), _clear(scene)


def _judge(
    fault: Fault,
    scene: Scene,
    study: list[checks.RecordedTrial],
    states: Any,
) -> list[str]:
    allowed = {"ok", "interrupted", *fault.outcomes}
    strange = []
    for trial in study:
        if trial.measurement.outcome not in allowed:
            strange.append(f"trial {trial.number} ended {trial.measurement.outcome}")
    open_still = []
    for name in ("RUNNING", "WAITING"):
        if states[name]:
            open_still.append(f"{states[name]} trials are {name}")
    files = []
    for folder in (scene.folder / "scratch").glob("autotune-probe-*"):
        files.append(f"{folder.name} was left")
    return [
        *strange,
        *open_still,
        *files,
        *checks.measured_twice(study),
        *checks.fastest_left_out(study),
        *checks.invented_measurements(scene, study),
        *checks.wrong_answer(scene.events("second"), study),
        *(
            text
            for name in ("first", "second")
            for text in checks.leaked_slots(scene.events(name), scene.slots)
        ),
    ]


def _lost(scene: Scene, study: list[checks.RecordedTrial]) -> list[str]:
    faults = []
    for name in ("before", "first", "second"):
        faults.extend(checks.lost_measurements(scene.events(name), study))
    return faults


def _clear(scene: Scene) -> int:
    """Return the number of leftover processes, and kill them for the sake of the next run."""
    pids = scene.marked_after(ORPHAN_SECONDS)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _as_before(shared: Stages) -> None:
    """A cluster that lost a node gets another one."""
    if shared.cluster is not None:
        while len(shared.cluster.worker_nodes) < shared.nodes - 1:
            shared.cluster.add_node(
                num_cpus=2,
                num_gpus=1,
                object_store_memory=80 * 2**20,
                include_dashboard=False,
            )
