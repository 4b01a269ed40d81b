"""One fault, one place, one seed: played out and judged."""

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
from tests.faults.table import FAULTS, Fault, Place

ON_NODES = Path(__file__).parent / "on_nodes"
NVML_FILE = "AUTOTUNE_TEST_NVML"
"""Says, to what lies there in NVML's place, which file tells what a GPU shows."""

ORPHAN_SECONDS = 10.0
"""How long the processes of a driver that ended may take to end as well."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What became of one run."""

    wrong: tuple[str, ...]
    """In words; empty where everything was as it must be."""

    lost: int
    orphans: int
    seconds: float

    @property
    def survived(self) -> bool:
        return not self.wrong


@dataclass(kw_only=True)
class Stages:
    """What runs share, made when first needed: a cluster and a database server."""

    folder: Path
    nodes: int = 0
    """Of the cluster, where there is one."""

    cluster: Any = None
    server: Any = None

    @property
    def moment(self) -> Path:
        """The file that tells the cluster's nodes what their GPU shows."""
        return self.folder / "moment.json"

    def scene(self, fault: Fault, place: Place, seed: int) -> Scene:
        random = Random(f"{fault.name} {place} {seed}")
        folder = self.folder / f"{fault.name.replace(' ', '-').replace(chr(39), '')}-{place}-{seed}"
        (folder / "db").mkdir(parents=True)
        on_server = fault.database == "postgres"
        return Scene(
            folder=folder, random=random, server=self.server, cluster=self.cluster,
            storage=self.server.url if on_server else f"sqlite:///{folder}/db/study.db",
            address=self.cluster.address if place == "ray" else None, ranks=fault.ranks,
            slots=fault.slots or 1 + seed % 2, at=random.choice((1, 2, 3)), moment=self.moment,
        )  # fmt: skip


@contextmanager
def stages(folder: Path, faults: tuple[Fault, ...], places: tuple[Place, ...]) -> Iterator[Stages]:
    """As much as these faults need."""
    made = Stages(folder=folder)
    with contextlib.ExitStack() as stack:
        if any(fault.database == "postgres" for fault in faults):
            from tests.study.postgres import server

            made.server = stack.enter_context(server())
        if any(set(places) & set(fault.places) & {"ray"} for fault in faults):
            from tests.executors.clusters import cluster

            made.nodes = max(fault.nodes for fault in faults)
            made.moment.write_text(json.dumps(None))
            os.environ[NVML_FILE] = str(made.moment)
            made.cluster = stack.enter_context(cluster(nodes=made.nodes, gpus=1, in_front=ON_NODES))
        yield made


def play(fault: Fault, place: Place, seed: int, shared: Stages) -> Found:
    began, scene = time.monotonic(), shared.scene(fault, place, seed)
    with fault.stage(scene):
        wrong, orphans = _first(fault, scene)
        if fault.mend is not None:
            fault.mend(scene)
        more, left = _second(scene)
        study, states = checks.told_in(scene)
        lost = _lost(scene, study)
        wrong += [*more, *_judge(fault, scene, study, states), *lost]
    _as_before(shared)
    count = orphans + left
    return Found(
        wrong=(*wrong, *([f"{count} processes were left"] if count else [])), lost=len(lost), orphans=count,
        seconds=time.monotonic() - began,
    )  # fmt: skip


def play_apart(name: str, folder: Path, seed: int) -> Found:
    """On this machine, in a process of its own that needs nothing of what runs share."""
    fault = next(fault for fault in FAULTS if fault.name == name)
    return play(fault, "local", seed, Stages(folder=folder))


def _first(fault: Fault, scene: Scene) -> tuple[list[str], int]:
    """The driver to which it happens."""
    trouble = None if fault.inside is None else {**fault.inside(scene.random), "at": scene.at}
    driver = scene.start(
        scene.order("first", trouble=trouble, resume=fault.resumes, deadline_seconds=fault.deadline_seconds, gpus=fault.gpus)
    )
    if fault.outside is not None:
        fault.outside(scene)
    code = driver.code(LONGEST_SECONDS)
    end = _end(scene, "first", code)
    wrong = [] if end in fault.ends else [f"the driver ended by {end} ({code}): {scene.heard('first')[-1:]}"]
    if fault.told is not None and end != "killed" and not (fault.may_pass_unseen and _unseen(scene)):
        wrong += checks.said_in_one_sentence(scene.heard("first"), fault.told)
    return wrong, _clear(scene)


def _end(scene: Scene, name: str, code: int | None) -> str:
    if code is None:
        assert scene.driver is not None
        scene.driver.kill()
        return "hanging"
    said = [key for line in scene.heard(name) for key in ("answer", "error") if key in line]
    return "killed" if code == -signal.SIGKILL else said[-1] if said else "nothing"


def _unseen(scene: Scene) -> bool:
    """Whether nothing went wrong as far as the driver could see."""

    def tells_trouble(line: Mapping[str, object]) -> bool:
        noted = "note" in line and not str(line["note"]).startswith("Measuring again alone")
        return noted or "error" in line or line.get("outcome", "ok") != "ok"

    return not any(map(tells_trouble, scene.heard("first")))


def _second(scene: Scene) -> tuple[list[str], int]:
    """Another driver goes on, with nothing in its way."""
    driver = scene.start(scene.order("second", resume=True))
    code = driver.code(LONGEST_SECONDS)
    end = _end(scene, "second", code)
    return ([] if end == "answer" else [f"resuming ended by {end} ({code}): {scene.heard('second')[-1:]}"]), _clear(scene)


def _judge(fault: Fault, scene: Scene, study: list[checks.Told], states: Any) -> list[str]:
    allowed = {"ok", "interrupted", *fault.outcomes}
    strange = [f"trial {one.number} ended {one.measurement.outcome}" for one in study if one.measurement.outcome not in allowed]
    open_still = [f"{states[name]} trials are {name}" for name in ("RUNNING", "WAITING") if states[name]]
    files = [f"{folder.name} was left" for folder in (scene.folder / "scratch").glob("autotune-rig-*")]
    return [
        *strange, *open_still, *files, *checks.measured_twice(study), *checks.invented_measurements(scene, study),
        *checks.wrong_answer(scene.heard("second"), study),
        *(text for name in ("first", "second") for text in checks.leaked_slots(scene.heard(name), scene.slots)),
    ]  # fmt: skip


def _lost(scene: Scene, study: list[checks.Told]) -> list[str]:
    return [text for name in ("before", "first", "second") for text in checks.lost_measurements(scene.heard(name), study)]


def _clear(scene: Scene) -> int:
    """How many processes were left; they are ended, so that the next run is not disturbed."""
    left = scene.marked_after(ORPHAN_SECONDS)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return len(left)


def _as_before(shared: Stages) -> None:
    """A cluster that lost a node gets another one."""
    if shared.cluster is not None:
        while len(shared.cluster.worker_nodes) < shared.nodes - 1:
            shared.cluster.add_node(num_cpus=2, num_gpus=1, object_store_memory=80 * 2**20, include_dashboard=False)
