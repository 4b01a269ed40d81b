"""Ray Core, on real clusters of this machine: nodes are lost, drivers are killed, resources are
short, jobs span nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.core.errors import (
    BadInput,
    HardwareNotHere,
    ProbeError,
    SlotLost,
    TrainingEnvironmentError,
)
from autotune.core.measurement import Outcome
from tests.executors.measuring import hold, measured, phase, sleep
from tests.probe.toys import gone, toy, tree_of

pytest.importorskip("ray", reason="the extra `ray` is not installed")
from tests.executors.clusters import ROOT, cluster, ray_executor

pytestmark = pytest.mark.slow

WELL = toy(phase("rollout"), sleep(0.01))


def wait_for(file: Path, seconds: float = 60.0) -> int:
    until = time.monotonic() + seconds
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < until, f"{file.name} never came"
        time.sleep(0.02)
    return int(file.read_text())


def test_missing_resources_of_a_cluster_are_reported_at_once(
    two_nodes: Any, tmp_path: Path
) -> None:
    began = time.monotonic()
    with pytest.raises(
        BadInput,
        match=(
            r"9 slots of cpu were requested, and the cluster has room for [24]: it has 2 nodes of 2"
            r" CPUs.*at most --slots"
        ),
    ):
        ray_executor(two_nodes.address, tmp_path, slots=9).prepare()
    with pytest.raises(
        HardwareNotHere, match=r"64xcpu was requested, and the cluster has 2 nodes of 2 CPUs"
    ):
        ray_executor(two_nodes.address, tmp_path, ranks=64).prepare()
    with pytest.raises(HardwareNotHere, match=r"A probe may use .*smaller --memory-limit"):
        ray_executor(two_nodes.address, tmp_path, limit_mib=2**24).prepare()
    assert time.monotonic() - began < 60


def test_missing_cluster_is_reported_with_a_command(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no Ray cluster at 127.0.0.1:1 .*--address HOST:6379"):
        ray_executor("127.0.0.1:1", tmp_path).prepare()


def test_bad_interpreter_is_reported_with_its_node(two_nodes: Any, tmp_path: Path) -> None:
    with pytest.raises(TrainingEnvironmentError, match="cannot be started"):
        ray_executor(two_nodes.address, tmp_path, python=tmp_path / "nothing").prepare()


def test_a_hang_is_ended_at_its_deadline_and_the_slot_goes_on(
    two_nodes: Any, tmp_path: Path
) -> None:
    executor = ray_executor(two_nodes.address, tmp_path, slots=1)
    try:
        measured(executor, WELL)
        hung = toy(phase("reward"), {"do": "spin"})
        began = time.monotonic()
        assert measured(executor, hung, 1.0).outcome is Outcome.TIMEOUT
        assert time.monotonic() - began < 10
        assert measured(executor, WELL).outcome is Outcome.OK
    finally:
        executor.close()


def test_a_job_that_spans_nodes_is_one_job(two_nodes: Any, tmp_path: Path) -> None:
    """Four ranks on two nodes of two processors each see all numbers, and give one measurement."""
    executor = ray_executor(two_nodes.address, tmp_path, ranks=4)
    try:
        executor.prepare()
        assert len(executor.slots) == 1
        script = (
            phase("rollout"),
            hold(10),
            sleep(0.2, rank=3),
        )
        measurement = measured(executor, toy(*script))
        assert measurement.outcome is Outcome.OK and measurement.worst is not None
        assert measurement.worst.cycle_loss_tokens == (400, 400)
        assert all(seconds >= 0.2 for seconds in measurement.worst.cycle_seconds)
        assert measurement.effective["rank"] == "0"
        too_much = toy(phase("backward"), {"do": "peer"}, hold(400, rank=3))
        began = time.monotonic()
        failed = measured(executor, too_much, 40)
        assert failed.outcome is Outcome.OOM_BACKWARD
        assert failed.failure is not None and failed.failure.rank == 3
        assert time.monotonic() - began < 20
        assert measured(executor, toy(*script)).outcome is Outcome.OK
    finally:
        executor.close()


def test_a_lost_node_is_a_fault_and_its_slot_moves_or_is_lost(tmp_path: Path) -> None:
    """A third node has room for one slot of the node that is lost; when that is lost as well,
    there is none.
    """
    with cluster(nodes=1, cpus=1) as ray_cluster:
        workers = [
            ray_cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20) for _ in range(2)
        ]
        running = ray_executor(ray_cluster.address, tmp_path, slots=2)
        try:
            running.prepare()
            pids = {}
            for slot in (0, 1):
                file = tmp_path / f"pid-{slot}"
                candidate = toy({"do": "grandchild", "pid_file": str(file)})
                measured(running, candidate, slot=slot)
                pids[slot] = int(file.read_text())
            node_ids = _node_of(running, 0), _node_of(running, 1)
            lost = next(
                node
                for node in (*workers, ray_cluster.head_node)
                if node.node_id in node_ids and node is not ray_cluster.head_node
            )
            slot = node_ids.index(lost.node_id)
            ray_cluster.remove_node(lost, allow_graceful=False)
            assert gone(pids[slot], within=60)  # until its worker notices, the slot still answers
            with pytest.raises(ProbeError, match="was lost"):
                measured(running, WELL, slot=slot)
            assert measured(running, WELL, slot=slot).outcome is Outcome.OK
            assert measured(running, WELL, slot=1 - slot).outcome is Outcome.OK
            second = next(node for node in workers if node is not lost)
            slot = 0 if _node_of(running, 0) == second.node_id else 1
            ray_cluster.remove_node(second, allow_graceful=False)
            with pytest.raises(ProbeError):
                for _ in range(600):  # until its worker notices, the slot still answers
                    measured(running, WELL, slot=slot)
                    time.sleep(0.1)
            with pytest.raises(SlotLost):
                measured(running, WELL, slot=slot)
            assert measured(running, WELL, slot=1 - slot).outcome is Outcome.OK
        finally:
            running.close()


def _node_of(running: Any, slot: int) -> str:
    from ray.util.placement_group import placement_group_table

    return str(placement_group_table(running._slots[slot]._group)["bundles_to_node_id"][0])


DRIVER = (Path(__file__).parent / "programs/ray_driver.py.txt").read_text()


def test_a_killed_driver_leaves_nothing_on_the_cluster(two_nodes: Any, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, two_nodes.address, str(tmp_path)], env=environment
    )
    grandchild = wait_for(tmp_path / "grandchild")
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert gone(grandchild, within=60)
    executor = ray_executor(two_nodes.address, tmp_path, slots=2)
    try:
        assert len(executor.slots) == 2  # nothing of the cluster is still held
    finally:
        executor.close()


def test_closing_while_a_probe_runs_leaves_nothing(two_nodes: Any, tmp_path: Path) -> None:
    executor = ray_executor(two_nodes.address, tmp_path, slots=1)
    file = tmp_path / "grandchild"
    long = toy({"do": "grandchild", "pid_file": str(file)}, sleep(60))
    ended: list[BaseException] = []

    def measure() -> None:
        try:
            measured(executor, long, 100)
        except ProbeError as error:
            ended.append(error)

    thread = threading.Thread(target=measure)
    thread.start()
    grandchild = wait_for(file)
    assert len(tree_of(grandchild)) >= 1
    executor.interrupt()
    thread.join(10)
    executor.close()
    assert gone(grandchild, within=15) and len(ended) == 1
