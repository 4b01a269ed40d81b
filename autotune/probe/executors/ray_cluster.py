"""Connection of the Ray executor to its cluster: the head, and the nodes that are alive."""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Mapping
from typing import Any

import msgspec

import autotune
from autotune.core.errors import BadInput, MissingExtra, SlotLost
from autotune.machine.signals import restored_signals, skip_exit_handlers
from autotune.probe.executors import ray_node
from autotune.probe.executors.cluster_plan import Node, first_line
from autotune.probe.executors.ray_node import HeadWatch

try:
    import ray
    from ray.exceptions import NodeDiedError, RayError, TaskUnschedulableError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:
    raise MissingExtra("--executor ray", "ray") from missing

CONNECT_SECONDS = 10.0
INSPECT_SECONDS = 120.0  # A node that has not described itself by then is left out
ACTOR_VARIABLES = {"RAY_kill_child_processes_on_worker_exit": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""A Ray worker must not kill its children at exit: autotune's worker ends what a probe left.
Older Ray versions hide a node's GPUs from tasks that reserve none."""


class RayCluster:
    """Connection to a cluster at `address`, by default the one on this machine."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._connected = False
        self._head: HeadWatch | None = None
        self.interrupted = False
        """True while waits for the cluster shall end early."""
        self.head_lost = False
        """True once the head did not answer: any further call to it would block until Ray ends this process."""

    def connect(self) -> None:
        if ray.is_initialized():
            return
        with restored_signals():
            try:
                # Without a server, ConnectionError at once: Ray would retry for most of a minute.
                host, separator, port = (self._address or "").rpartition(":")
                if separator and port.isdigit() and "/" not in host:
                    socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
                ray.init(address=self._address or "auto", log_to_driver=False, configure_logging=False, namespace="autotune")
            except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
                where = f"at {self._address}" if self._address else "on this machine"
                raise BadInput(
                    f"There is no Ray cluster {where} to connect to ({first_line(error)}).",
                    way_out="Start one with `ray start --head`, or give its address with --address HOST:6379.",
                ) from error
        self._connected = True
        self._head = HeadWatch(ray.get_runtime_context().gcs_address)

    def disconnect(self) -> None:
        if not self._connected:
            return
        self._connected = False
        if self.reaches_head():
            ray.shutdown()
        else:
            atexit.unregister(ray.shutdown)

    def check_head(self) -> None:
        """Raise SlotLost if the head has not answered for a while."""
        if self._head is not None and self._head.is_lost():
            self._lose_head()

    def reaches_head(self) -> bool:
        """Return False without a head: nothing can be released, and the nodes end their actors by themselves."""
        self.head_lost = self.head_lost or (self._head is not None and not self._head.answers())
        return not self.head_lost

    def require_head(self) -> None:
        """Wait for a head that does not answer at the moment; SlotLost if it stays away."""
        if self._head is not None and not self._head.wait():
            self._lose_head()

    def _lose_head(self) -> None:
        self.head_lost = True
        os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"  # of the probes that end with it
        skip_exit_handlers()
        raise SlotLost("The head of the Ray cluster does not answer any more. Start it again and go on with --resume.")


def inspect_nodes() -> list[Node]:
    """Return every node that is alive, as it describes itself."""
    alive = [each for each in ray.nodes() if each["Alive"]]
    # The actors' environment: the task's process then serves as an actor, which saves seconds.
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": ACTOR_VARIABLES})(ray_node.inspect_node)
    pending = {
        each["NodeID"]: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(each["NodeID"], soft=False)).remote()
        for each in alive
    }
    done, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=INSPECT_SECONDS)
    nodes = [_node(each, pending[each["NodeID"]]) for each in alive if pending[each["NodeID"]] in done]
    return [node for node in nodes if node is not None]


def _node(entry: Mapping[str, Any], reply: Any) -> Node | None:
    """Return None for a node that was lost meanwhile."""
    name, resources = entry.get("NodeManagerHostname", entry["NodeID"]), entry.get("Resources", {})
    way_out = f"Install the same autotune on every node: pip install 'grpo-autotune[ray]=={autotune.__version__}'."
    try:
        node = msgspec.json.decode(ray.get(reply), type=Node)
    except (TaskUnschedulableError, NodeDiedError):
        return None
    except RayError as error:
        raise BadInput(f"The node {name} can't run autotune ({str(error).strip().splitlines()[-1]}).", way_out=way_out) from error
    if node.version != autotune.__version__:
        raise BadInput(f"The node {name} has autotune {node.version}, and here is {autotune.__version__}.", way_out=way_out)
    return msgspec.structs.replace(node, id=entry["NodeID"], cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)))
