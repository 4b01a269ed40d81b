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
from autotune.core.measurement import Measurement, Outcome, ProbePlan
from autotune.core.space import Candidate
from autotune.machine.signals import restored_signals, skip_exit_handlers
from autotune.probe.executors import ray_node
from autotune.probe.executors.ray_node import HeadWatch, Node, Plan, first_line, merged
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

CONNECT_SECONDS = 10.0
INSPECT_SECONDS = 120.0  # A node that has not described itself by then is left out
REPLACE_SECONDS = 30.0
START_SECONDS = 180.0
CLOSE_SECONDS = 30.0
HURRIED_CLOSE_SECONDS = 3.0  # After Ctrl-C, or without a head
GRACE_SECONDS = 60.0  # Wait beyond a probe's own deadline, which its node enforces
POLL_INTERVAL_S = 0.5  # Maximum delay of an interruption
STRAGGLER_SECONDS = 5.0  # Wait for the other nodes' replies after the first failure
ACTOR_VARIABLES = {
    "RAY_kill_child_processes_on_worker_exit": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
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
                    socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
                ray.init(
                    address=self._address or "auto",
                    log_to_driver=False,
                    configure_logging=False,
                    namespace="autotune",
                )
            except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
                where = f"at {self._address}" if self._address else "on this machine"
                raise BadInput(
                    f"There is no Ray cluster {where} to connect to ({first_line(error)}).",
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
    alive = [each for each in ray.nodes() if each["Alive"]]
    # The actors' environment: the task's process then serves as an actor, which saves seconds.
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": ACTOR_VARIABLES})(
        ray_node.inspect_node
    )
    pending = {
        each["NodeID"]: (
            task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(each["NodeID"], soft=False)
            ).remote()
        )
        for each in alive
    }
    done, _ = ray.wait(list(pending.values()), num_returns=len(pending), timeout=INSPECT_SECONDS)
    nodes = [
        _node(each, pending[each["NodeID"]]) for each in alive if pending[each["NodeID"]] in done
    ]
    return [node for node in nodes if node is not None]


def _node(entry: Mapping[str, Any], reply: Any) -> Node | None:
    """Return None for a node that was lost meanwhile."""
    name, resources = entry.get("NodeManagerHostname", entry["NodeID"]), entry.get("Resources", {})
    way_out = (
        "Install the same autotune on every node: pip install"
        f" 'grpo-autotune[ray]=={autotune.__version__}'."
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
        self._cluster, self._cut, self._number = cluster, cut, number
        self._settings, self.requests = settings, requests
        self.loads = 0
        self._group: Any = None
        self._actors: list[Any] = []
        self._runner: ClusterRunner | None = None
        self.hosts: frozenset[str] = frozenset()

    def reserve(self) -> None:
        """Reserve the resources on equal nodes, without waiting."""
        live = {each["NodeID"] for each in ray.nodes() if each["Alive"]}
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
        actor = ray.remote(max_concurrency=3, max_restarts=0, max_task_retries=0)(ray_node.NodeSlot)
        settings = ray_node.SlotSettings(
            runner=self._settings,
            environment=ray_node.environment_to_send(),
            share=(self._number % self._cut.per_node, self._cut.per_node),
        )
        self._actors = [
            actor.options(
                num_cpus=self._cut.bundle.get("CPU", 0),
                num_gpus=self._cut.bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
                runtime_env={"env_vars": ACTOR_VARIABLES},
            ).remote(
                ray_node.encoded(
                    msgspec.structs.replace(settings, runner=replace(settings.runner, ranks=ranks))
                )
            )
            for index, ranks in enumerate(self._cut.ranks)
        ]
        replies = [
            msgspec.json.decode(reply)
            for reply in self._call(lambda one: one.prepare.remote(), START_SECONDS)
        ]
        for reply in replies:
            if "error" in reply:
                raise TrainingEnvironmentError(reply["error"])
        self.hosts = frozenset(reply["host"] for reply in replies)
        return dict(replies[0]["versions"])

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
        orders = [
            ray_node.encoded(msgspec.structs.replace(order, span=span)) for span in self._spans()
        ]
        refs = [
            actor.measure.remote(each) for actor, each in zip(self._actors, orders, strict=True)
        ]
        replies = [
            msgspec.json.decode(reply, type=ray_node.NodeReply)
            for reply in self._await(
                refs, order.plan.deadline_seconds + GRACE_SECONDS, stop_at=_failed
            )
        ]
        self.loads += max(reply.loads for reply in replies)
        for reply in replies:
            if reply.environment is not None:
                raise TrainingEnvironmentError(reply.environment)
        parts = [reply.measurement for reply in replies if reply.measurement is not None]
        failed = any(part.outcome is not Outcome.OK for part in parts)
        if self._cut.spans and (failed or len(parts) < len(replies)):
            self._call(lambda one: one.close.remote(), GRACE_SECONDS)
        faults = [reply.fault for reply in replies if reply.fault is not None]
        if faults and not failed:
            raise ProbeError(faults[0])
        return parts[0] if len(parts) == 1 else merged(parts)

    def unload(self) -> None:
        self._runner = None
        with contextlib.suppress(ProbeError):
            self._call(lambda one: one.unload.remote(), GRACE_SECONDS)

    def begin_close(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(RayError):
                actor.close.remote()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the actors close, then kill them and release the resources."""
        reaches_head = self._cluster.reaches_head()
        seconds = max(0.1, seconds if reaches_head else min(seconds, HURRIED_CLOSE_SECONDS))
        actors, self._actors, self._runner = self._actors, [], None
        with contextlib.suppress(RayError, ValueError):  # ray.wait refuses an empty list
            ray.wait(
                [actor.close.remote() for actor in actors], num_returns=len(actors), timeout=seconds
            )
        group, self._group = self._group, None
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
        address, port = ray.get(self._actors[0].meeting_point.remote(), timeout=GRACE_SECONDS)
        firsts = accumulate(ranks[:-1], initial=0)
        return [
            RankSpan(first=first, world=sum(ranks), address=address, port=port) for first in firsts
        ]

    def _call(self, call: Callable[[Any], Any], seconds: float) -> list[Any]:
        return self._await([call(actor) for actor in self._actors], seconds)

    def _await(
        self,
        refs: Sequence[Any],
        seconds: float,
        stop_at: Callable[[bytes], bool] = lambda _: False,
    ) -> list[Any]:
        """Return all replies in the nodes' order; after the first for which `stop_at` holds,
        those that arrive shortly. Any other end is a fault of the slot: ProbeError.
        """
        until, waiting = time.monotonic() + seconds, list(refs)
        found: dict[Any, Any] = {}
        try:
            while waiting:
                done, waiting = ray.wait(waiting, timeout=POLL_INTERVAL_S)
                found.update(zip(done, ray.get(done), strict=True))
                if self._cluster.interrupted:
                    raise ProbeError("The probe was interrupted.")
                self._cluster.check_head()
                if time.monotonic() > until:
                    raise ProbeError(
                        f"{self._where()} did not answer within {seconds:.0f} s: it is abandoned."
                    )
                if waiting and any(stop_at(reply) for reply in found.values()):
                    until, stop_at = (
                        min(until, time.monotonic() + STRAGGLER_SECONDS),
                        lambda _: False,
                    )
                    for actor in self._actors:
                        actor.interrupt.remote()
        except RayTaskError:
            raise  # a bug of autotune, with its own traceback
        except (RayActorError, RayError) as error:
            self._cluster.require_head()
            self._abandon()
            raise ProbeError(
                f"{self._where()} was lost during a measurement ({first_line(error)})."
            ) from error
        except ProbeError:
            self._abandon()
            raise
        return [found[ref] for ref in refs if ref in found]

    def _abandon(self) -> None:
        if not self._cluster.interrupted:
            self.close()

    def _where(self) -> str:
        return f"The slot on {' and '.join(sorted(self.hosts)) or 'the cluster'}"


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
