"""Executor on a Ray cluster, by Ray Core alone: a placement group per slot, an actor per node.

An actor contains the same slot as the local executor. However it exits, its worker exits too.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import msgspec

import autotune
from autotune.core.candidate import Candidate
from autotune.core.errors import BadInput, MissingExtra, ProbeError, SlotLost, TrainingEnvironmentError
from autotune.core.hardware import Hardware
from autotune.core.measurement import Measurement, Outcome
from autotune.core.probe_plan import ProbePlan
from autotune.machine.process_end import skip_exit_handlers
from autotune.machine.signals import restored_signals
from autotune.probe.executors import ray_node
from autotune.probe.executors.base import Slot
from autotune.probe.executors.cluster_plan import Node, Plan, check_port, differences, first_line, in_words, merged, plan
from autotune.probe.executors.ray_node import HeadWatch
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RankSpan, RunnerSettings

try:
    import ray
    from ray.exceptions import GetTimeoutError, NodeDiedError, RayActorError, RayError, RayTaskError, TaskUnschedulableError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as missing:
    raise MissingExtra("--executor ray", "ray") from missing

INSPECT_SECONDS = 120.0  # A node that has not described itself by then is left out
RESERVE_SECONDS = 60.0  # Wait for resources that other jobs of the cluster hold
REPLACE_SECONDS = 30.0
START_SECONDS = 180.0
CLOSE_SECONDS = 30.0
HURRIED_CLOSE_SECONDS = 3.0  # After Ctrl-C, or without a head
GRACE_SECONDS = 60.0  # Wait beyond a probe's own deadline, which its node enforces
POLL_INTERVAL_S = 0.5  # Maximum delay of an interruption
STRAGGLER_SECONDS = 5.0  # Wait for the other nodes' replies after the first failure
ACTOR_VARIABLES = {"RAY_kill_child_processes_on_worker_exit": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""A Ray worker must not kill its children at exit: autotune's worker ends what a probe left.
Older Ray versions hide a node's GPUs from tasks that reserve none."""


class RayExecutor:
    """Owner of the cluster slots, which are independent once `prepare` has reserved them."""

    def __init__(
        self,
        settings: RunnerSettings,
        requests: RequestBuilders,
        *,
        hardware: Hardware,
        address: str | None = None,
        slots: int | None = None,
    ) -> None:
        self.settings, self.requests = settings, requests
        self.interrupted = False
        self._hardware, self._requested, self._address = hardware, slots, address
        self._slots: list[ClusterSlot] = []
        self._versions: Mapping[str, str] = {}
        self._connected, self._loads, self._counting = False, 0, threading.Lock()
        self._head: HeadWatch | None = None
        self.head_lost = False
        """True once the head did not answer: any further call to it would block until Ray ends this process."""

    def prepare(self) -> Mapping[str, str]:
        if not self._slots:
            self._connect()
            try:
                self._versions = self._open_slots()
            except BaseException:
                self.close()
                raise
        return self._versions

    @property
    def slots(self) -> tuple[Slot, ...]:
        self.prepare()
        return tuple(
            Slot(number=number, hosts=slot.hosts, words=f"slot {number} on {' and '.join(sorted(slot.hosts))}")
            for number, slot in enumerate(self._slots)
        )

    def open(self, candidate: Candidate, slot: int = 0) -> ClusterRunner:
        self.prepare()
        return self._slots[slot].open(candidate)

    @property
    def loads(self) -> int:
        return self._loads

    def interrupt(self) -> None:
        self.interrupted = True

    def close(self) -> None:
        until = time.monotonic() + (HURRIED_CLOSE_SECONDS if self.interrupted else CLOSE_SECONDS)
        self.interrupted = True
        for slot in self._slots:
            slot.begin_close()
        for slot in self._slots:
            slot.close(until - time.monotonic())
        self._slots.clear()
        if self._connected:
            self._connected = False
            if not self.reaches_head():
                atexit.unregister(ray.shutdown)
            else:
                ray.shutdown()
        self.interrupted = False

    def check_head(self) -> None:
        """Raise SlotLost if the head has not answered for a while."""
        if self._head is not None and self._head.is_lost():
            self._lose_head()

    def reaches_head(self) -> bool:
        """Return False without a head: nothing can be released, and the nodes end their actors by
        themselves."""
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

    def count_loads(self, loads: int) -> None:
        with self._counting:
            self._loads += loads

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        with restored_signals():
            try:
                check_port(self._address)
                ray.init(address=self._address or "auto", log_to_driver=False, configure_logging=False, namespace="autotune")
            except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
                where = f"at {self._address}" if self._address else "on this machine"
                raise BadInput(
                    f"There is no Ray cluster {where} to connect to ({first_line(error)}).",
                    way_out="Start one with `ray start --head`, or give its address with --address HOST:6379.",
                ) from error
        self._connected = True
        self._head = HeadWatch(ray.get_runtime_context().gcs_address)

    def _open_slots(self) -> Mapping[str, str]:
        # 1. Divide the nodes, reserve every slot's resources at once, then wait.
        cut = plan(inspect_nodes(), self._hardware, self.settings.limit_bytes, self._requested)
        self._slots = [ClusterSlot(self, cut, number) for number in range(cut.slots)]
        for slot in self._slots:
            slot.reserve()
        self._slots = self._reserved(cut)
        # 2. Start the actors; their versions must agree.
        versions = [slot.start() for slot in self._slots]
        if any(other != versions[0] for other in versions):
            raise BadInput(
                f"The nodes have different versions installed: their measurements are not comparable ({differences(versions)}).",
                way_out="Install the same on every node.",
            )
        return {**versions[0], "nodes": " ".join(cut.nodes[0].kind)}

    def _reserved(self, cut: Plan) -> list[ClusterSlot]:
        """Return the slots with resources in time; an explicitly requested number must be complete."""
        until = time.monotonic() + RESERVE_SECONDS
        ready = [slot for slot in self._slots if slot.wait_for_room(max(1.0, until - time.monotonic()))]
        for slot in self._slots:
            if slot not in ready:
                slot.close()
        if not ready or (self._requested is not None and len(ready) < self._requested):
            raise BadInput(
                f"{self._requested or 1} slots of {self._hardware} need {dict(cut.bundle)} each on {len(cut.ranks)} nodes; the "
                f"cluster has {in_words(cut.nodes)}, and after {RESERVE_SECONDS:.0f} s only {len(ready)} were free.",
                way_out="Wait until other jobs end (see `ray status`), or use fewer --slots.",
            )
        return ready


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


class ClusterSlot:
    """Room for one runner on the cluster; on other nodes after the loss of one."""

    def __init__(self, owner: RayExecutor, cut: Plan, number: int) -> None:
        self.owner, self._cut, self._number = owner, cut, number
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
            [dict(self._cut.bundle)] * count, strategy="STRICT_SPREAD" if count > 1 else "STRICT_PACK",
            bundle_label_selector=[{"ray.io/node-id": f"in({','.join(alike)})"}] * count,
        )  # fmt: skip

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
            runner=self.owner.settings, environment=ray_node.environment_to_send(),
            share=(self._number % self._cut.per_node, self._cut.per_node),
        )  # fmt: skip
        self._actors = [
            actor.options(
                num_cpus=self._cut.bundle.get("CPU", 0), num_gpus=self._cut.bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index),
                runtime_env={"env_vars": ACTOR_VARIABLES},
            ).remote(ray_node.encoded(msgspec.structs.replace(settings, runner=replace(settings.runner, ranks=ranks))))
            for index, ranks in enumerate(self._cut.ranks)
        ]  # fmt: skip
        replies = [msgspec.json.decode(reply) for reply in self._call(lambda one: one.prepare.remote(), START_SECONDS)]
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
        orders = [ray_node.encoded(msgspec.structs.replace(order, span=span)) for span in self._spans()]
        refs = [actor.measure.remote(each) for actor, each in zip(self._actors, orders, strict=True)]
        replies = [
            msgspec.json.decode(reply, type=ray_node.NodeReply)
            for reply in self._await(refs, order.plan.deadline_seconds + GRACE_SECONDS, stop_at=_failed)
        ]
        self.owner.count_loads(max(reply.loads for reply in replies))
        return self._merged(replies)

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
        reaches_head = self.owner.reaches_head()
        seconds = max(0.1, seconds if reaches_head else min(seconds, HURRIED_CLOSE_SECONDS))
        actors, self._actors, self._runner = self._actors, [], None
        with contextlib.suppress(RayError, ValueError):  # ray.wait refuses an empty list
            ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=seconds)
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
        self.owner.require_head()
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
        return [RankSpan(first=first, world=sum(ranks), address=address, port=port) for first in firsts]

    def _merged(self, replies: Sequence[ray_node.NodeReply]) -> Measurement:
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

    def _call(self, call: Callable[[Any], Any], seconds: float) -> list[Any]:
        return self._await([call(actor) for actor in self._actors], seconds)

    def _await(self, refs: Sequence[Any], seconds: float, stop_at: Callable[[bytes], bool] = lambda _: False) -> list[Any]:
        """Return all replies; after the first for which `stop_at` holds, those that arrive shortly.

        Any other end is a fault of the slot: ProbeError.
        """
        until, waiting, found = time.monotonic() + seconds, list(refs), []
        try:
            while waiting:
                done, waiting = ray.wait(waiting, timeout=POLL_INTERVAL_S)
                found += ray.get(done)
                if self.owner.interrupted:
                    raise ProbeError("The probe was interrupted.")
                self.owner.check_head()
                if time.monotonic() > until:
                    raise ProbeError(f"{self._where()} did not answer within {seconds:.0f} s: it is abandoned.")
                if waiting and any(stop_at(reply) for reply in found):
                    until, stop_at = min(until, time.monotonic() + STRAGGLER_SECONDS), lambda _: False
                    for actor in self._actors:
                        actor.interrupt.remote()
        except RayTaskError:
            raise  # a bug of autotune, with its own traceback
        except (RayActorError, RayError) as error:
            self.owner.require_head()
            self._abandon()
            raise ProbeError(f"{self._where()} was lost during a measurement ({first_line(error)}).") from error
        except ProbeError:
            self._abandon()
            raise
        return found

    def _abandon(self) -> None:
        if not self.owner.interrupted:
            self.close()

    def _where(self) -> str:
        return f"The slot on {' and '.join(sorted(self.hosts)) or 'the cluster'}"


class ClusterRunner:
    """Runner whose model is loaded in the slot's actors."""

    def __init__(self, slot: ClusterSlot, load_key: str) -> None:
        self.load_key = load_key
        self._slot = slot

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        if candidate.load_key != self.load_key:
            raise ProbeError(f"Candidate {candidate.id} needs load {candidate.load_key}; this runner has {self.load_key}.")
        requests = self._slot.owner.requests
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
