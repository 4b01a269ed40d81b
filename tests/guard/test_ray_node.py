"""A guard around Ray's driver: the node of its worker is lost, and the run goes on from its
checkpoint on another one. A real cluster of Ray on this machine.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.guard.child import state_at_the_end
from tests.guard.guarded import GuardedRun

cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

# A step as in child.py, made by an actor on a node that has a trainer's resource.
DRIVER = """
import hashlib
import json
import sys
import time
from pathlib import Path

import ray

STEPS, SAVE_EVERY, GLOBAL_BATCH = 12, 3, 8


@ray.remote(resources={"trainer": 1}, max_restarts=0)
class Trainer:
    def step(self, state, step):
        time.sleep(0.5)
        for sample in range(GLOBAL_BATCH):
            state = hashlib.sha256(f"{state}{step}{sample}".encode()).hexdigest()
        return state


folder = Path(sys.argv[1])
attempts = folder / "attempts"
attempts.mkdir(exist_ok=True)
number = len(list(attempts.iterdir())) + 1
(attempts / str(number)).write_text(" ".join(sys.argv[3:]))
step, state = 0, "start"
if len(sys.argv) > 4:
    stored = json.loads((Path(sys.argv[4]) / "state.json").read_text())
    step, state = stored["step"], stored["state"]
ray.init(address=sys.argv[2])
trainer = Trainer.remote()
while step < STEPS:
    state = ray.get(trainer.step.remote(state, step))
    step += 1
    print(f"step:{step} - loss:1.0", flush=True)
    if step % SAVE_EVERY == 0:
        checkpoint = folder / "out" / f"step_{step}"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "state.json").write_text(json.dumps({"step": step, "state": state}))
(folder / "final").write_text(state)
"""


class GuardedDriver(GuardedRun):
    """The guard around a driver of Ray."""

    def __init__(self, folder: Path, address: str) -> None:
        self.driver = folder / "driver.py"
        self.driver.write_text(DRIVER)
        self.address = address
        super().__init__(folder)

    def training(self) -> list[str]:
        return [
            *(sys.executable, str(self.driver), str(self.folder), self.address),
            *("{micro}", "{checkpoint}"),
        ]


def test_a_lost_node_of_ray_is_restarted_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Found dead after two seconds, not after the usual twenty.
    monkeypatch.setenv("RAY_health_check_initial_delay_ms", "0")
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    try:
        lost = cluster.add_node(num_cpus=1, resources={"trainer": 1})
        guarded = GuardedDriver(tmp_path, cluster.address)
        guarded.wait_for("out/step_6/state.json")
        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(num_cpus=1, resources={"trainer": 1})
        code, messages = guarded.end()
    finally:
        cluster.shutdown()
    assert code == 0, messages
    assert [arguments[0] for arguments in guarded.attempts] == ["8", "8"], "micro-batch"
    assert Path(guarded.attempts[1][1]).name in ("step_6", "step_9")
    end = guarded.document["attempts"][0]["end"]
    assert end["reason"] == "machine"
    assert "its node has died" in end["evidence"]
    assert (tmp_path / "final").read_text() == state_at_the_end()
