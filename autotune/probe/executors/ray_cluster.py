"""Cluster of the Ray executor: the connection to its head and its nodes, and a slot on them: a
placement group, an actor on each node, and the runner in them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import msgspec

import autotune
from autotune.core.errors import (
    BadInput,
    MissingExtra,
    ProbeError,
    SlotLost,
    TrainingEnvironmentError,
)
from autotune.core.installation import pip_requirement
from autotune.core.measurement import Measurement, Outcome, ProbePlan
from autotune.core.space import Candidate
from autotune.machine.signals import restored_signals, skip_exit_handlers
from autotune.probe.executors import ray_node
from autotune.probe.executors.head_watch import HeadWatch
from autotune.probe.executors.merged_parts import merged
from autotune.probe.executors.ray_node import first_line
from autotune.probe.executors.ray_plan import Node, Plan
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RankSpan, RunnerSettings

try:
    import ray
    from ray.exceptions import (
        GetTimeoutError,
        NodeDiedError,
        RayActorError,
        RayError,
        RayTaskError,
        TaskUnschedulableError,
    )
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ImportError as missing:
    raise MissingExtra("--executor ray", "ray") from missing

CLUSTER_CONNECT_SECONDS = 10.0
INSPECT_SECONDS = 120.0  # A node that has not described itself by then is left out
REPLACE_SECONDS = 30.0
CLUSTER_START_SECONDS = 180.0
CLUSTER_CLOSE_SECONDS = 30.0
HURRIED_CLOSE_SECONDS = 3.0  # After Ctrl-C, or without a head
CLUSTER_GRACE_SECONDS = 60.0  # Wait beyond a probe's own deadline, which its node enforces
CLUSTER_POLL_S = 0.5  # Maximum delay of an interruption
STRAGGLER_SECONDS = 5.0  # Wait for the other nodes' replies after the first failure

# A Ray worker must not kill its children at exit: autotune's worker ends what a probe left.
# Older Ray versions hide a node's GPUs from tasks that reserve none.
ACTOR_VARIABLES = {
    "RAY_kill_child_processes_on_worker_exit": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


class RayCluster:
    """Connection to a cluster at `address`, by default the one on this machine."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self._connected = False
        self._head: HeadWatch | None = None

        self.interrupted = False
        """True while waits for the cluster shall end early."""

        self.head_lost = False
        """True once the head did not answer: any further call to it would block until Ray ends
        this process.
        """

    def connect(self) -> None:
        if ray.is_initialized():
            return
        with restored_signals():
            try:
                # Without a server, ConnectionError at once: Ray would retry for most of a minute.
                host, separator, port = (self._address or "").rpartition(":")
                if separator and port.isdigit() and "/" not in host:
                    socket.create_connection(
                        (host, int(port)), timeout=CLUSTER_CONNECT_SECONDS
                    ).close()
                ray.init(
                    address=self._address or "auto",
                    log_to_driver=False,
                    configure_logging=False,
                    namespace="autotune",
                )
            except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
                place = f"at {self._address}" if self._address else "on this machine"
                raise BadInput(
                    f"There is no Ray cluster {place} to connect to ({first_line(error)}).",
                    way_out=(
                        "Start one with `ray start --head`, or give its address with --address"
                        " HOST:6379."
                    ),
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
        """Return False without a head: nothing can be released, and the nodes end their actors
        by themselves.
        """
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
        raise SlotLost(
            "The head of the Ray cluster does not answer any more. Start it again and go on with"
            " --resume."
        )


def inspect_nodes() -> list[Node]:
    """Return every node that is alive, as it describes itself."""
    entries = [entry for entry in ray.nodes() if entry["Alive"]]
    # The actors' environment: the task's process then serves as an actor, which saves seconds.
    task = ray.remote(
        num_cpus=0,
        max_retries=0,
        runtime_env={"env_vars": ACTOR_VARIABLES},
    )(ray_node.inspect_node)
    replies = []
    for entry in entries:
        strategy = NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False)
        replies.append(task.options(scheduling_strategy=strategy).remote())
    done, _ = ray.wait(replies, num_returns=len(replies), timeout=INSPECT_SECONDS)
    nodes = []
    for entry, reply in zip(entries, replies, strict=True):
        if reply not in done:
            continue
        node = _node(entry, reply)
        if node is not None:
            nodes.append(node)
    return nodes


def _node(entry: Mapping[str, Any], reply: Any) -> Node | None:
    """Return None for a node that was lost meanwhile."""
    name = entry.get("NodeManagerHostname", entry["NodeID"])
    resources = entry.get("Resources", {})
    way_out = (
        f"Install the same autotune on every node, {autotune.__version__}: pip install"
        f" {pip_requirement('ray')}"
    )
    try:
        node = msgspec.json.decode(ray.get(reply), type=Node)
    except (TaskUnschedulableError, NodeDiedError):
        return None
    except RayError as error:
        raise BadInput(
            f"The node {name} can't run autotune ({str(error).strip().splitlines()[-1]}).",
            way_out=way_out,
        ) from error
    if node.version != autotune.__version__:
        raise BadInput(
            f"The node {name} has autotune {node.version}, and here is {autotune.__version__}.",
            way_out=way_out,
        )
    return msgspec.structs.replace(
        node,
        id=entry["NodeID"],
        cpus=int(resources.get("CPU", 0)),
        gpus=int(resources.get("GPU", 0)),
    )


class ClusterSlot:
    """Room for one runner on the cluster; on other nodes after the loss of one."""

    def __init__(
        self,
        cluster: RayCluster,
        cut: Plan,
        number: int,
        settings: RunnerSettings,
        requests: RequestBuilders,
    ) -> None:
        self._cluster = cluster
        self._cut = cut
        self._number = number
        self._settings = settings
        self.requests = requests
        self.loads = 0
        self._group: Any = None
        self._actors: list[Any] = []
        self._runner: ClusterRunner | None = None
        self.hosts: frozenset[str] = frozenset()

    def reserve(self) -> None:
        """Reserve the resources on equal nodes, without waiting."""
        live = {entry["NodeID"] for entry in ray.nodes() if entry["Alive"]}
        alike = [node.id for node in self._cut.nodes if node.id in live]
        count = len(self._cut.ranks)
        if len(alike) < count:
            raise SlotLost("No node is left that is like the one that was lost.")
        self._group = placement_group(
            [dict(self._cut.bundle)] * count,
            strategy="STRICT_SPREAD" if count > 1 else "STRICT_PACK",
            bundle_label_selector=[{"ray.io/node-id": f"in({','.join(alike)})"}] * count,
        )

    def wait_for_room(self, seconds: float) -> bool:
        try:
            ray.get(self._group.ready(), timeout=seconds)
        except GetTimeoutError:
            return False
        return True

    def start(self) -> Mapping[str, str]:
        """Start an actor on each of the slot's nodes; return the versions by package."""
        settings = ray_node.SlotSettings(
            runner=self._settings,
            environment=ray_node.environment_to_send(),
            share=(self._number % self._cut.per_node, self._cut.per_node),
        )
        self._actors = []
        for index, ranks in enumerate(self._cut.ranks):
            runner = replace(settings.runner, ranks=ranks)
            self._actors.append(
                self._start_actor(index, msgspec.structs.replace(settings, runner=runner))
            )
        replies = []
        for reply in self._call(lambda actor: actor.prepare.remote(), CLUSTER_START_SECONDS):
            replies.append(msgspec.json.decode(reply))
        for reply in replies:
            if "error" in reply:
                raise TrainingEnvironmentError(reply["error"])
        self.hosts = frozenset(reply["host"] for reply in replies)
        return dict(replies[0]["versions"])

    def _start_actor(self, index: int, settings: ray_node.SlotSettings) -> Any:
        kind = ray.remote(
            max_concurrency=3,
            max_restarts=0,
            max_task_retries=0,
        )(ray_node.NodeSlot)
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        options = kind.options(
            num_cpus=self._cut.bundle.get("CPU", 0),
            num_gpus=self._cut.bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            runtime_env={"env_vars": ACTOR_VARIABLES},
        )
        return options.remote(ray_node.encoded(settings))

    def open(self, candidate: Candidate) -> ClusterRunner:
        if not self._actors:
            self._replace()
        if self._runner is None or self._runner.load_key != candidate.load_key:
            self._runner = ClusterRunner(self, candidate.load_key)
        return self._runner

    def measure(self, order: ray_node.ProbeOrder) -> Measurement:
        """Measure on all nodes of the slot at once; a failure on one ends the others early."""
        if not self._actors:
            self._replace()
        references = []
        for actor, span in zip(self._actors, self._spans(), strict=True):
            part = msgspec.structs.replace(order, span=span)
            references.append(actor.measure.remote(ray_node.encoded(part)))
        seconds = order.plan.deadline_seconds + CLUSTER_GRACE_SECONDS
        replies = []
        for reply in self._await(references, seconds, stop_at=_failed):
            replies.append(msgspec.json.decode(reply, type=ray_node.NodeReply))
        self.loads += max(reply.loads for reply in replies)
        parts = []
        faults = []
        for reply in replies:
            if reply.environment is not None:
                raise TrainingEnvironmentError(reply.environment)
            if reply.measurement is not None:
                parts.append(reply.measurement)
            if reply.fault is not None:
                faults.append(reply.fault)
        failed = any(part.outcome is not Outcome.OK for part in parts)
        if self._cut.spans and (failed or len(parts) < len(replies)):
            self._call(lambda actor: actor.close.remote(), CLUSTER_GRACE_SECONDS)
        if faults and not failed:
            raise ProbeError(faults[0])
        if len(parts) == 1:
            return parts[0]
        return merged(parts)

    def unload(self) -> None:
        self._runner = None
        with contextlib.suppress(ProbeError):
            self._call(lambda actor: actor.unload.remote(), CLUSTER_GRACE_SECONDS)

    def begin_close(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(RayError):
                actor.close.remote()

    def close(self, seconds: float = CLUSTER_CLOSE_SECONDS) -> None:
        """Let the actors close, then kill them and release the resources."""
        reaches_head = self._cluster.reaches_head()
        if not reaches_head:
            seconds = min(seconds, HURRIED_CLOSE_SECONDS)
        actors = self._actors
        self._actors = []
        self._runner = None
        with contextlib.suppress(RayError, ValueError):  # ray.wait refuses an empty list
            closing = [actor.close.remote() for actor in actors]
            ray.wait(closing, num_returns=len(actors), timeout=max(0.1, seconds))
        group = self._group
        self._group = None
        if not reaches_head:
            return
        for actor in actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor)
        if group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    def _replace(self) -> None:
        self._cluster.require_head()
        self.reserve()
        if not self.wait_for_room(REPLACE_SECONDS):
            self.close()
            raise SlotLost("No other node has room for the slot of the one that was lost.")
        self.start()

    def _spans(self) -> list[RankSpan | None]:
        ranks = self._cut.ranks
        if not self._cut.spans:
            return [None]
        address, port = ray.get(
            self._actors[0].meeting_point.remote(), timeout=CLUSTER_GRACE_SECONDS
        )
        spans: list[RankSpan | None] = []
        for first in accumulate(ranks[:-1], initial=0):
            spans.append(
                RankSpan(
                    first=first,
                    world=sum(ranks),
                    address=address,
                    port=port,
                )
            )
        return spans

    def _call(self, call: Callable[[Any], Any], seconds: float) -> list[Any]:
        return self._await([call(actor) for actor in self._actors], seconds)

    def _await(
        self,
        references: Sequence[Any],
        seconds: float,
        stop_at: Callable[[bytes], bool] = lambda _: False,
    ) -> list[Any]:
        """Return all replies in the nodes' order; after the first for which `stop_at` holds,
        those that arrive shortly. Any other end is a fault of the slot: ProbeError.
        """
        try:
            replies = self._replies(references, seconds, stop_at)
        except RayTaskError:
            raise  # a bug of autotune, with its own traceback
        except (RayActorError, RayError) as error:
            self._cluster.require_head()
            self._abandon()
            raise ProbeError(
                f"{self._place()} was lost during a measurement ({first_line(error)})."
            ) from error
        except ProbeError:
            self._abandon()
            raise
        return [replies[reference] for reference in references if reference in replies]

    def _replies(
        self,
        references: Sequence[Any],
        seconds: float,
        stop_at: Callable[[bytes], bool],
    ) -> dict[Any, Any]:
        """Return the replies that arrive in time, by reference."""
        deadline = time.monotonic() + seconds
        waiting = list(references)
        replies: dict[Any, Any] = {}
        is_stopping = False
        while waiting:
            # 1. Those that are there.
            done, waiting = ray.wait(waiting, timeout=CLUSTER_POLL_S)
            replies.update(zip(done, ray.get(done), strict=True))

            # 2. Reasons to wait no longer.
            if self._cluster.interrupted:
                raise ProbeError("The probe was interrupted.")
            self._cluster.check_head()
            if time.monotonic() > deadline:
                raise ProbeError(
                    f"{self._place()} did not answer within {seconds:.0f} s: it is abandoned."
                )

            # 3. After a reply that stops the others, wait for these shortly.
            if waiting and not is_stopping and any(map(stop_at, replies.values())):
                is_stopping = True
                deadline = min(deadline, time.monotonic() + STRAGGLER_SECONDS)
                for actor in self._actors:
                    actor.interrupt.remote()
        return replies

    def _abandon(self) -> None:
        if not self._cluster.interrupted:
            self.close()

    def _place(self) -> str:
        hosts = " and ".join(sorted(self.hosts))
        return f"The slot on {hosts or 'the cluster'}"


class ClusterRunner:
    def __init__(self, slot: ClusterSlot, load_key: str) -> None:
        self.load_key = load_key
        self._slot = slot

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        if candidate.load_key != self.load_key:
            raise ProbeError(
                f"Candidate {candidate.id} needs load {candidate.load_key}; this runner has"
                f" {self.load_key}."
            )
        requests = self._slot.requests
        return self._slot.measure(
            ray_node.ProbeOrder(
                candidate=candidate,
                plan=plan,
                load_request=requests.load(candidate),
                probe_request=requests.probe(candidate, plan),
            )
        )

    def close(self) -> None:
        self._slot.unload()


def _failed(encoded_reply: bytes) -> bool:
    reply = msgspec.json.decode(encoded_reply, type=ray_node.NodeReply)
    return reply.measurement is None or reply.measurement.outcome is not Outcome.OK
