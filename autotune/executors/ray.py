"""Probes on the nodes of a Ray cluster, by Ray Core alone: a placement group for each slot, and an actor on each of its nodes.

An actor holds the same seat as a local slot has, so what a probe does there is what it does here. When an actor ends,
however it does, its keeper ends with it: an actor that is killed leaves nothing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import autotune
from autotune.candidate import Candidate
from autotune.errors import BadInput, MissingExtra, RigError, SlotLost, TrainingEnvironmentError
from autotune.executors import node as on_node
from autotune.executors.base import Slot
from autotune.executors.cluster import Node, Plan, differences, first_line, in_words, knock, plan
from autotune.executors.spanning import merged
from autotune.hardware import DeviceKind, Hardware
from autotune.measurement import Measurement, Outcome
from autotune.rig.keeper import Span, Supported
from autotune.rig.process_rig import LoadRequest, ProbeRequest
from autotune.signals import signals_kept
from autotune.trainers.base import ProbePlan

try:
    import ray
    from ray.exceptions import GetTimeoutError, NodeDiedError, RayActorError, RayError, RayTaskError, TaskUnschedulableError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as missing:
    raise MissingExtra("--executor ray", "ray") from missing

LOOK_SECONDS = 120.0
"""A node that does not say what it is after so long is left out."""

PLACE_SECONDS = 60.0
"""How long a cluster's resources are waited for while others hold them."""

REPLACE_SECONDS = 30.0
START_SECONDS = 180.0
GRACE_SECONDS = 60.0
"""Beyond a probe's own deadline, which its node keeps."""

TURN_SECONDS = 0.5
"""How soon an interruption is noticed."""

OF_WORKERS = {"RAY_kill_child_processes_on_worker_exit": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""A worker that ends would kill the keeper, and with it the one who ends what a probe left in sessions of its own. And older
Rays hide a node's GPUs from whoever only looks at it."""


class RayExecutor:
    """Owner of the slots. Only `prepare` speaks of resources; afterwards each slot looks after itself."""

    def __init__(
        self,
        *,
        python: Path,
        adapter: str,
        ranks: int,
        load_request: LoadRequest,
        probe_request: ProbeRequest,
        limit_bytes: int,
        hardware: Hardware,
        device_kind: DeviceKind = "cpu",
        devices: int | None = None,
        supported_versions: Supported | None = None,
        scratch_root: Path | None = None,
        address: str | None = None,
        slots: int | None = None,
    ) -> None:
        self._seating = on_node.Seating(
            python=str(python), adapter=adapter, ranks=ranks, limit_bytes=limit_bytes, device_kind=device_kind, devices=devices,
            supported=dict(supported_versions or {}), scratch_root=None if scratch_root is None else str(scratch_root),
            environment=on_node.environment_to_send(), share=None,
        )  # fmt: skip
        self._hardware, self._limit_bytes, self._wanted, self._address = hardware, limit_bytes, slots, address
        self.load_request, self.probe_request = load_request, probe_request
        self._seats: list[ClusterSlot] = []
        self._versions: Mapping[str, str] = {}
        self._connected, self._loads, self._counting = False, 0, threading.Lock()
        self.interrupted = False

    def prepare(self) -> Mapping[str, str]:
        if not self._seats:
            self._connect()
            try:
                self._versions = self._have_slots()
            except BaseException:
                self.close()
                raise
        return self._versions

    @property
    def slots(self) -> tuple[Slot, ...]:
        self.prepare()
        return tuple(
            Slot(number=number, hosts=seat.hosts, words=f"slot {number} on {' and '.join(sorted(seat.hosts))}")
            for number, seat in enumerate(self._seats)
        )

    def open(self, candidate: Candidate, slot: int = 0) -> ClusterRig:
        self.prepare()
        return self._seats[slot].open(candidate)

    @property
    def loads(self) -> int:
        return self._loads

    def interrupt(self) -> None:
        self.interrupted = True

    def close(self) -> None:
        self.interrupted = True
        for seat in self._seats:
            seat.ask_to_end()
        for seat in self._seats:
            seat.close()
        self._seats.clear()
        if self._connected:
            self._connected = False
            ray.shutdown()
        self.interrupted = False

    def count(self, loads: int) -> None:
        with self._counting:
            self._loads += loads

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        with signals_kept():
            try:
                knock(self._address)
                ray.init(address=self._address or "auto", log_to_driver=False, configure_logging=False, namespace="autotune")
            except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
                where = f"at {self._address}" if self._address else "on this machine"
                raise BadInput(
                    f"There is no Ray cluster {where} to connect to ({first_line(error)}).",
                    way_out="Start one with `ray start --head`, or say where it is with --address HOST:6379.",
                ) from error
        self._connected = True

    def _have_slots(self) -> Mapping[str, str]:
        cut = plan(look(), self._hardware, self._limit_bytes, self._wanted)
        seats = [ClusterSlot(self, self._seating, cut, number) for number in range(cut.slots)]
        self._seats = seats
        for seat in seats:
            seat.reserve()
        self._seats = self._those_with_room(cut)
        told = [seat.start() for seat in self._seats]
        if any(versions != told[0] for versions in told):
            raise BadInput(
                "The nodes have different versions installed, so that what is measured on them can't be compared "
                f"({differences(told)}).",
                way_out="Install the same on every node.",
            )
        return {**told[0], "nodes": " ".join(cut.nodes[0].kind)}

    def _those_with_room(self, cut: Plan) -> list[ClusterSlot]:
        """What others hold of the cluster may come free in a minute; what was asked for by number is not given up in silence."""
        until = time.monotonic() + PLACE_SECONDS
        ready = [seat for seat in self._seats if seat.wait_for_room(max(1.0, until - time.monotonic()))]
        for seat in self._seats:
            if seat not in ready:
                seat.close()
        if not ready or (self._wanted is not None and len(ready) < self._wanted):
            raise BadInput(
                f"{self._wanted or 1} slots of {self._hardware} need {dict(cut.bundle)} each on {len(cut.ranks)} nodes; the "
                f"cluster has {in_words(cut.nodes)}, and after {PLACE_SECONDS:.0f} s only {len(ready)} were free.",
                way_out="Wait until other jobs end (see `ray status`), or ask for fewer --slots.",
            )
        return ready


def look() -> list[Node]:
    """Every node that is alive, in its own words."""
    alive = [each for each in ray.nodes() if each["Alive"]]
    # With the actors' own environment, so that the process that looked serves as an actor next: starting one takes seconds.
    task = ray.remote(num_cpus=0, max_retries=0, runtime_env={"env_vars": OF_WORKERS})(on_node.look)
    asked = {
        each["NodeID"]: task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(each["NodeID"], soft=False)).remote()
        for each in alive
    }
    done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=LOOK_SECONDS)
    heard = [_node(each, asked[each["NodeID"]]) for each in alive if asked[each["NodeID"]] in done]
    return [node for node in heard if node is not None]


def _node(told: Mapping[str, Any], answer: Any) -> Node | None:
    """None for a node that was lost meanwhile."""
    name, resources = told.get("NodeManagerHostname", told["NodeID"]), told.get("Resources", {})
    way_out = f"Install the same autotune on every node: pip install 'grpo-autotune[ray]=={autotune.__version__}'."
    try:
        node = msgspec.json.decode(ray.get(answer), type=Node)
    except (TaskUnschedulableError, NodeDiedError):
        return None
    except RayError as error:
        said = str(error).strip().splitlines()[-1]
        raise BadInput(f"The node {name} can't run autotune ({said}).", way_out=way_out) from error
    if node.version != autotune.__version__:
        raise BadInput(f"The node {name} has autotune {node.version}, and here is {autotune.__version__}.", way_out=way_out)
    return msgspec.structs.replace(node, id=told["NodeID"], cpus=int(resources.get("CPU", 0)), gpus=int(resources.get("GPU", 0)))


class ClusterSlot:
    """Room for one rig somewhere on the cluster; somewhere else when its node was lost."""

    def __init__(self, owner: RayExecutor, seating: on_node.Seating, cut: Plan, number: int) -> None:
        self.owner, self._cut, self._number = owner, cut, number
        self._seating = seating
        self._group: Any = None
        self._actors: list[Any] = []
        self._rig: ClusterRig | None = None
        self.hosts: frozenset[str] = frozenset()

    def reserve(self) -> None:
        """Ask for the resources, without waiting for them; on nodes that are alike and alive."""
        there = {each["NodeID"] for each in ray.nodes() if each["Alive"]}
        alike = [node.id for node in self._cut.nodes if node.id in there]
        if len(alike) < len(self._cut.ranks):
            raise SlotLost("No node is left that is like the one that was lost.")
        selector = {"ray.io/node-id": f"in({','.join(alike)})"}
        count = len(self._cut.ranks)
        self._group = placement_group(
            [dict(self._cut.bundle)] * count, strategy="STRICT_SPREAD" if count > 1 else "STRICT_PACK",
            bundle_label_selector=[selector] * count,
        )  # fmt: skip

    def wait_for_room(self, seconds: float) -> bool:
        try:
            ray.get(self._group.ready(), timeout=seconds)
        except GetTimeoutError:
            return False
        return True

    def start(self) -> Mapping[str, str]:
        """An actor on each of the slot's nodes; versions by package."""
        actor = ray.remote(max_concurrency=3, max_restarts=0, max_task_retries=0)(on_node.NodeSeat)
        share = (self._number % self._cut.per_node, self._cut.per_node)
        self._actors = [
            actor.options(
                num_cpus=self._cut.bundle.get("CPU", 0), num_gpus=self._cut.bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place),
                runtime_env={"env_vars": OF_WORKERS},
            ).remote(msgspec.json.encode(msgspec.structs.replace(self._seating, ranks=ranks, share=share)))
            for place, ranks in enumerate(self._cut.ranks)
        ]  # fmt: skip
        told = [msgspec.json.decode(answer) for answer in self._ask(lambda one: one.prepare.remote(), START_SECONDS)]
        for each in told:
            if "error" in each:
                raise TrainingEnvironmentError(each["error"])
        self.hosts = frozenset(each["host"] for each in told)
        return dict(told[0]["versions"])

    def open(self, candidate: Candidate) -> ClusterRig:
        if not self._actors:
            self._place_anew()
        if self._rig is None or self._rig.load_key != candidate.load_key:
            self._rig = ClusterRig(self, candidate.load_key)
        return self._rig

    def measure(self, ordered: on_node.Ordered) -> Measurement:
        """On all of its nodes at once; where one fails, nobody waits for the others' deadlines."""
        if not self._actors:
            self._place_anew()
        spans = self._spans()
        words = [msgspec.json.encode(msgspec.structs.replace(ordered, span=span)) for span in spans]
        refs = [actor.measure.remote(each) for actor, each in zip(self._actors, words, strict=True)]
        answers = self._await(refs, ordered.plan.deadline_seconds + GRACE_SECONDS, enough=_failed)
        replies = [msgspec.json.decode(answer, type=on_node.Reply) for answer in answers]
        self.owner.count(max(reply.loads for reply in replies))
        return self._found(replies)

    def unload(self) -> None:
        self._rig = None
        with contextlib.suppress(RigError):
            self._ask(lambda one: one.unload.remote(), GRACE_SECONDS)

    def ask_to_end(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(RayError):
                actor.close.remote()

    def close(self) -> None:
        """The actors get a moment to put things away; then they are ended."""
        actors, self._actors, self._rig = self._actors, [], None
        with contextlib.suppress(RayError, ValueError):  # there may be none to wait for
            ray.wait([actor.close.remote() for actor in actors], num_returns=len(actors), timeout=30.0)
        for actor in actors:
            with contextlib.suppress(RayError, ValueError):
                ray.kill(actor)
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    def _place_anew(self) -> None:
        self.reserve()
        if not self.wait_for_room(REPLACE_SECONDS):
            self.close()
            raise SlotLost("No other node has room for the slot of the one that was lost.")
        self.start()

    def _spans(self) -> list[Span | None]:
        if not self._cut.spans:
            return [None]
        address, port = ray.get(self._actors[0].meeting_point.remote(), timeout=GRACE_SECONDS)
        world, firsts = sum(self._cut.ranks), [sum(self._cut.ranks[:place]) for place in range(len(self._cut.ranks))]
        return [Span(first=first, world=world, address=address, port=port) for first in firsts]

    def _found(self, replies: Sequence[on_node.Reply]) -> Measurement:
        for reply in replies:
            if reply.environment is not None:
                raise TrainingEnvironmentError(reply.environment)
        parts = [reply.measurement for reply in replies if reply.measurement is not None]
        failed = [part for part in parts if part.outcome is not Outcome.OK]
        if self._cut.spans and (failed or len(parts) < len(replies)):
            self._ask(lambda one: one.close.remote(), GRACE_SECONDS)
        faults = [reply.fault for reply in replies if reply.fault is not None]
        if faults and not failed:
            raise RigError(faults[0])
        return parts[0] if len(parts) == 1 else merged(parts)

    def _ask(self, call: Callable[[Any], Any], seconds: float) -> list[Any]:
        return self._await([call(actor) for actor in self._actors], seconds)

    def _await(self, refs: Sequence[Any], seconds: float, enough: Callable[[bytes], bool] = lambda _: False) -> list[Any]:
        """All answers; those that are there once one of them is `enough`. Whatever else happens is a fault of the slot."""
        until, waiting, found = time.monotonic() + seconds, list(refs), []
        try:
            while waiting:
                done, waiting = ray.wait(waiting, timeout=TURN_SECONDS)
                found += ray.get(done)
                if self.owner.interrupted:
                    raise RigError("The rig was interrupted.")
                if time.monotonic() > until:
                    raise RigError(f"{self._where()} did not answer within {seconds:.0f} s: it is given up.")
                if waiting and any(enough(answer) for answer in found):
                    until, enough = min(until, time.monotonic() + 5.0), lambda _: False
                    for actor in self._actors:
                        actor.interrupt.remote()
        except RayTaskError:
            raise  # a fault of ours, with its own traceback
        except (RayActorError, RayError) as error:
            self._give_up()
            raise RigError(f"{self._where()} was lost while it was measuring ({first_line(error)}).") from error
        except RigError:
            self._give_up()
            raise
        return found

    def _give_up(self) -> None:
        if not self.owner.interrupted:
            self.close()

    def _where(self) -> str:
        return f"The slot on {' and '.join(sorted(self.hosts)) or 'the cluster'}"


class ClusterRig:
    """What the slot's actors hold."""

    def __init__(self, slot: ClusterSlot, load_key: str) -> None:
        self.load_key = load_key
        self._slot = slot

    def measure(self, candidate: Candidate, plan: ProbePlan) -> Measurement:
        if candidate.load_key != self.load_key:
            raise RigError(f"Candidate {candidate.id} needs load {candidate.load_key}; this rig has {self.load_key}.")
        owner = self._slot.owner
        ordered = on_node.Ordered(
            knobs=dict(candidate.knobs), settings=dict(candidate.settings), load=dict(candidate.load), plan=plan,
            load_request=owner.load_request(candidate), probe_request=owner.probe_request(candidate, plan),
        )  # fmt: skip
        return self._slot.measure(ordered)

    def close(self) -> None:
        self._slot.unload()


def _failed(answer: bytes) -> bool:
    reply = msgspec.json.decode(answer, type=on_node.Reply)
    return reply.measurement is None or reply.measurement.outcome is not Outcome.OK
