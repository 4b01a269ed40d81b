"""Faults that are caused from outside of a running search."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.faults.scene import Scene, small_disk

MAX_STOP_SECONDS = 10.0
"""Bound on the time between a stop signal and the exit."""

CLOCK = Path(__file__).parent / "jumping_clock.c"


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def kill_the_probe(scene: Scene) -> None:
    probe = scene.wait_for_probe(scene.at)
    scene.a_moment(0.08)
    if probe is not None:
        _kill(probe["pid"])


def kill_the_worker(scene: Scene) -> None:
    _kill_above(scene, 1)


def kill_the_actor(scene: Scene) -> None:
    """Kill the process on a cluster node that contains the worker handle."""
    _kill_above(scene, 2)


def _kill_above(scene: Scene, generations: int) -> None:
    probe = scene.wait_for_probe(scene.at)
    with contextlib.suppress(OSError):  # the probe may be over by now
        pid = probe["pid"] if probe else 0
        for _ in range(generations if pid else 0):
            pid = parent_of(pid)
        scene.a_moment(0.05)
        if pid > 1:
            _kill(pid)


def kill_the_driver(scene: Scene) -> None:
    scene.wait_for_probe(scene.at)
    scene.a_moment(0.2)
    assert scene.driver is not None
    scene.driver.kill()


def lose_the_node(scene: Scene) -> None:
    """Its raylet is gone without a word, and everything below it with it."""
    probe = scene.wait_for_probe(scene.at)
    scene.a_moment(0.05)
    if probe is None:
        return
    above = _ancestors(probe["pid"])
    for node in list(scene.cluster.worker_nodes):
        if node.all_processes["raylet"][0].process.pid in above:
            scene.cluster.remove_node(node, allow_graceful=False)


def _ancestors(pid: int) -> set[int]:
    pids: set[int] = set()
    with contextlib.suppress(OSError):
        while pid > 1:
            pid = parent_of(pid)
            pids.add(pid)
    return pids


def database(scene: Scene) -> Path:
    return scene.folder / "db" / "study.db"


def lock_the_database(scene: Scene) -> None:
    scene.wait_for_probe(scene.at)
    connection = sqlite3.connect(database(scene), isolation_level=None, timeout=30)
    connection.execute("BEGIN EXCLUSIVE")
    time.sleep(scene.random.uniform(6.0, 8.0))
    connection.execute("ROLLBACK")
    connection.close()


def take_the_database_away(scene: Scene) -> None:
    scene.wait_for_probe(scene.at)
    folder, away = scene.folder / "db", scene.folder / "db-away"
    folder.rename(away)
    time.sleep(scene.random.uniform(0.5, 2.0))
    away.rename(folder)


def stop_the_server(scene: Scene) -> None:
    scene.wait_for_probe(scene.at)
    scene.server.stop(scene.random.choice([signal.SIGINT, signal.SIGQUIT]))
    time.sleep(scene.random.uniform(3.5, 5.0))
    scene.server.start()


def make_the_server_read_only(scene: Scene) -> None:
    """Emulate a failover to a standby: connections are cut, and new ones may only read."""
    scene.wait_for_probe(scene.at)
    _on_server(scene, "ALTER DATABASE postgres SET default_transaction_read_only = on")
    assert scene.driver is not None
    scene.driver.code(60.0)
    _on_server(
        scene,
        "SET default_transaction_read_only = off; ALTER DATABASE postgres RESET"
        " default_transaction_read_only",
    )


def _on_server(scene: Scene, statements: str) -> None:
    import psycopg

    other_clients = "pid <> pg_backend_pid() AND backend_type = 'client backend'"
    cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {other_clients}"
    with psycopg.connect(scene.server.url, autocommit=True) as connection:
        for statement in statements.split("; "):
            connection.execute(statement)  # type: ignore[call-overload]
        connection.execute(cut)


def fill_the_disk(scene: Scene) -> None:
    """Full from one moment on."""
    scene.wait_for_probe(scene.at)
    with contextlib.suppress(OSError), _filler(scene).open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def free_the_disk(scene: Scene) -> None:
    _filler(scene).unlink()


def _filler(scene: Scene) -> Path:
    return scene.folder / "db" / "filler"


def end_probes_from_outside(scene: Scene) -> None:
    """Signal up to three probes in a row, as an operator, a scheduler or the OOM killer does."""
    for number in range(scene.at, scene.at + scene.random.choice((1, 2, 3))):
        probe = scene.wait_for_probe(number)
        scene.a_moment(0.08)
        if probe is not None:
            with contextlib.suppress(OSError):
                os.kill(
                    probe["pid"],
                    scene.random.choice((signal.SIGTERM, signal.SIGKILL, signal.SIGHUP)),
                )


def stop_twice(scene: Scene) -> None:
    """Press Ctrl-C while a scheduler sends SIGTERM."""
    scene.wait_for_probe(scene.at)
    scene.a_moment(0.1)
    assert scene.driver is not None and scene.driver.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(OSError):
            os.kill(scene.driver.pid, number)
    if scene.driver.code(MAX_STOP_SECONDS) is None:
        scene.wrong.append(f"the driver was still there {MAX_STOP_SECONDS:.0f} s after the signals")


def start_a_second_run(scene: Scene) -> None:
    """Start another run with the same output folder."""
    scene.wait_for_probe(scene.at)
    first = scene.driver
    assert first is not None
    second = scene.start(scene.order("intruder", resume=True))
    second.code(60.0)
    scene.driver = first
    refused = [line["text"] for line in scene.events("intruder") if line.get("error") == "BadInput"]
    if first.code(0.0) is None and not any(
        f"in use by process {first.pid} on " in text for text in refused
    ):
        scene.wrong.append(f"a second run was not refused: {scene.events('intruder')}")


@contextlib.contextmanager
def own_cluster(scene: Scene) -> Iterator[None]:
    """Give the run a cluster that it may destroy, and a fresh one for its resumption."""
    from tests.executors.clusters import cluster

    shared = scene.cluster, scene.address
    with contextlib.ExitStack() as stack:
        scene.cluster = stack.enter_context(cluster(nodes=2))
        scene.address = scene.cluster.address
        scene.closing = stack
        yield
    scene.cluster, scene.address = shared


def kill_the_head(scene: Scene) -> None:
    """Kill the head's server, alone or with its raylet, so that its machine seems lost."""
    scene.wait_for_probe(scene.at)
    scene.a_moment(0.1)
    processes = scene.cluster.head_node.all_processes
    for name in ("gcs_server", *scene.random.choice(((), ("raylet",)))):
        _kill(processes[name][0].process.pid)


def start_another_cluster(scene: Scene) -> None:
    from tests.executors.clusters import cluster

    for node in [*scene.cluster.worker_nodes, scene.cluster.head_node]:
        scene.cluster.remove_node(node, allow_graceful=False)  # to drain them would need the head
    scene.closing.close()
    scene.cluster = scene.closing.enter_context(cluster(nodes=2))
    scene.address = scene.cluster.address


@contextlib.contextmanager
def as_it_is(scene: Scene) -> Iterator[None]:
    """Change nothing."""
    yield


@contextlib.contextmanager
def small_scratch(scene: Scene) -> Iterator[None]:
    with small_disk(scene.folder / "scratch", 8):
        yield


@contextlib.contextmanager
def small_database(scene: Scene) -> Iterator[None]:
    with small_disk(scene.folder / "db", 3):
        yield


@contextlib.contextmanager
def read_only_database(scene: Scene) -> Iterator[None]:
    """A driver was killed, and since then the file system of its study can only be read."""
    with small_disk(scene.folder / "db", 8):
        scene.start(scene.order("before"))
        kill_the_driver(scene)
        assert scene.driver is not None
        scene.driver.code(30.0)
        _remount(scene, "ro")
        yield


def make_it_writable(scene: Scene) -> None:
    _remount(scene, "rw")


def _remount(scene: Scene, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(scene.folder / "db")], check=True)


def jump_the_clock(scene: Scene) -> None:
    scene.wait_for_probe(scene.at)
    (scene.folder / "jumped").touch()


@contextlib.contextmanager
def jumping_clock(scene: Scene) -> Iterator[None]:
    """Give every process of this run a false time of day, by a preloaded library. On a cluster
    the driver's clock jumps once: a Ray client with an unsteady clock does not connect.
    """
    library = scene.folder / "clock.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(CLOCK), "-ldl"], check=True
    )
    scene.variables["LD_PRELOAD"] = str(library)
    if scene.address is not None:
        scene.variables["AUTOTUNE_CLOCK_JUMPS_WITH"] = str(scene.folder / "jumped")
    yield
