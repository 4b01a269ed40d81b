"""Complete table of faults: cause, place, and the required state afterwards.

After every fault: no process is left, no slot is missing, no measurement is lost or invented, the
study resumes to the same answer as without the fault, and the user got a message.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from random import Random
from typing import Any, Literal, get_args

from tests.faults import acts
from tests.faults.scene import Act, Scene
from tests.search.postgres import installed

End = Literal["answer", "error", "killed"]
ExecutorKind = Literal["local", "ray"]
PLACES: tuple[ExecutorKind, ...] = get_args(ExecutorKind)
Inside = Callable[[Random], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Row of the table."""

    name: str
    how: str
    """Description of the cause."""

    inside: Inside | None = None
    """Action of the probe itself."""

    outside: Act | None = None
    """Action while the search runs."""

    message: str | None = None
    """Pattern of the message to the user; None where no process is left to print it, or there is
    no need.
    """

    may_pass_unseen: bool = False
    """True: at some moments the fault has no effect, and no message is needed."""

    outcomes: frozenset[str] = frozenset()
    """Outcomes that probes may have besides `ok`."""

    ends: frozenset[End] = frozenset({"answer"})
    """Ways in which the driver may end."""

    places: tuple[ExecutorKind, ...] = ("local", "ray")
    why_not_elsewhere: str = ""
    stage: Callable[[Scene], AbstractContextManager[None]] = acts.as_it_is
    mend: Act | None = None
    """Repair before the study is resumed."""

    slots: int | None = None
    """Number of slots; None: one or two, by the seed."""

    ranks: int = 1
    nodes: int = 2
    """Minimum number of nodes of a cluster."""

    deadline_seconds: float = 30.0
    database: Literal["sqlite", "postgres"] = "sqlite"
    resumes: bool = False
    """True: the study exists before the run."""

    gpus: bool = False
    heavy: bool = False
    """Takes long: fewer seeds."""

    heavy_on: tuple[ExecutorKind, ...] = ()
    """Places where it does, if not at all of them."""

    needs_root: bool = False

    @property
    def own_cluster(self) -> bool:
        """Return True if each run destroys a cluster of its own."""
        return self.stage is acts.own_cluster

    @property
    def apart(self) -> bool:
        """Return True if runs harm nothing that they share, so that they can go beside each
        other.
        """
        return self.own_cluster or not (self.heavy or self.gpus or self.database == "postgres")


def why_not_here(fault: Fault, place: ExecutorKind) -> str | None:
    """Return the missing prerequisite; None where the fault can run."""
    if place not in fault.places:
        return fault.why_not_elsewhere
    if place == "ray" and find_spec("ray") is None:
        return "ray is not installed"
    if fault.ranks > 1 and find_spec("torch") is None:
        return "torch is not installed"
    if fault.database == "postgres" and not (find_spec("psycopg") and installed("initdb")):
        return "psycopg or the PostgreSQL server is not installed"
    if fault.needs_root and os.geteuid():
        return "file systems can only be mounted by root"
    if fault.stage is acts.jumping_clock and shutil.which("cc") is None:
        return "there is no C compiler"
    return None


def _wire(random: Random) -> Mapping[str, Any]:
    content = random.choice(
        [
            b'no json\n[1, 2]\n{"event": "measured", "id": \n{"event": "ph',
            b'{"event": "measured", "id": 3, "rank": 0, "result": {"worst": {"cycle_sec',
            b'{"event": "lost", "id": null, "rank": "all"}\n',
            b"[" * 100_000 + b"\n",
            b'\n{"event": "measured", "id": 1e999, "result": NaN}\n',
            random.randbytes(100_000),
            b"x" * 2_000_000,
        ]
    )
    return {
        "name": "wire",
        "words": content.hex(),
        "then": random.choice([None, "killed", "exits"]),
    }


def _nonsense(random: Random) -> Mapping[str, Any]:
    seconds = random.choice([["soon"], [-1.0], [0.0], [1e300, 1], [], "never"])
    speed = {
        "completion_tokens": 1,
        "cycle_seconds": seconds,
        "cycle_loss_tokens": [10**9],
        "prompt_tokens": 0,
    }
    results = [{"worst": speed}, {"worst": 7}, [1], {"peak_bytes": -1}, {"world_size": "x"}]
    return {"name": "nonsense", "result": random.choice(results)}


FAULTS = (
    Fault(
        name="probe killed",
        how="SIGKILL to the rank at a random moment",
        outside=acts.kill_the_probe,
        message="SIGKILL, sent from outside",
        may_pass_unseen=True,
    ),
    Fault(
        name="probes ended from outside",
        how="SIGTERM, SIGKILL or SIGHUP to the rank, up to three probes in a row",
        outside=acts.end_probes_from_outside,
        message="SIG(TERM|KILL|HUP), sent from outside",
        may_pass_unseen=True,
    ),
    Fault(
        name="worker killed",
        how="SIGKILL to the parent of the ranks at a random moment",
        outside=acts.kill_the_worker,
        message=r"worker process exited.*Trying again",
        may_pass_unseen=True,
    ),
    Fault(
        name="grandchild left",
        how=(
            "a daemon in a session of its own; its probe then ends well, raises, exits or is killed"
        ),
        inside=lambda random: {
            "name": "grandchild",
            "then": random.choice([None, "raises", "exits", "killed"]),
        },
        message=r"SIGKILL|grandchild|exit code 1",
        may_pass_unseen=True,
        outcomes=frozenset({"crash"}),
    ),
    Fault(
        name="hangs in Python",
        how="an endless loop that ignores SIGTERM",
        inside=lambda random: {"name": "hang in Python"},
        message="no answer after .* ended at its deadline",
        outcomes=frozenset({"timeout"}),
        deadline_seconds=4.0,
    ),
    Fault(
        name="hangs in C",
        how="a native call that keeps the interpreter's lock",
        inside=lambda random: {"name": "hang in C"},
        message="no answer after .* ended at its deadline",
        outcomes=frozenset({"timeout"}),
        deadline_seconds=4.0,
    ),
    Fault(
        name="hangs in a collective",
        how="all_reduce over gloo that one of two ranks never joins",
        inside=lambda random: {"name": "hang in a collective"},
        message="no answer after .* ended at its deadline",
        outcomes=frozenset({"timeout"}),
        deadline_seconds=20.0,
        ranks=2,
        slots=1,
        heavy=True,
    ),
    Fault(
        name="floods its output",
        how="1 GiB on stdout",
        inside=lambda random: {"name": "flood", "mib": 1024},
        slots=1,
        heavy=True,
        deadline_seconds=100.0,
    ),
    Fault(
        name="broken wire",
        how=(
            "half lines, nonsense, deep nesting, bytes that are no text; then goes on, exits or is"
            " killed"
        ),
        inside=_wire,
        message="exit code 1|SIGKILL",
        may_pass_unseen=True,
        outcomes=frozenset({"crash"}),
    ),
    Fault(
        name="answers nonsense",
        how="an answer in JSON that has not the agreed form",
        inside=_nonsense,
        message="agreed form",
        outcomes=frozenset({"crash"}),
    ),
    Fault(
        name="eats memory",
        how="private or shared memory beyond the limit",
        inside=lambda random: {
            "name": "memory",
            "mib": random.randrange(300, 600),
            "shared": random.random() < 0.5,
        },
        message="memory|SIGKILL",
        outcomes=frozenset({"oom_load", "oom_rollout"}),
    ),
    Fault(
        name="exits 0 without a result",
        how="os._exit(0)",
        inside=lambda random: {"name": "exit 0"},
        message="exit code 0 and no result",
        outcomes=frozenset({"crash"}),
    ),
    Fault(
        name="fills the disk",
        how="writes into scratch, a small file system, until it is full",
        inside=lambda random: {"name": "disk"},
        message="No space left",
        outcomes=frozenset({"crash"}),
        stage=acts.small_scratch,
        needs_root=True,
    ),
    Fault(
        name="driver killed",
        how="SIGKILL at a random moment",
        outside=acts.kill_the_driver,
        ends=frozenset({"killed", "answer"}),
    ),
    Fault(
        name="driver stopped twice",
        how="SIGINT, SIGTERM and SIGINT at once; it exits within 10 s",
        outside=acts.stop_twice,
    ),
    Fault(
        name="second run into the folder",
        how="another run with the same --out",
        outside=acts.start_a_second_run,
    ),
    Fault(
        name="clock jumps",
        outside=acts.jump_the_clock,
        stage=acts.jumping_clock,
        heavy=True,
        how=(
            "time of day up to eleven days off, in either direction, at every tenth call"
            " (LD_PRELOAD); on Ray once, by nine"
        ),
    ),
    Fault(
        name="SQLite locked",
        how="another process holds it exclusively for seconds",
        outside=acts.lock_the_database,
        message="does not answer .*locked.* waiting for it",
        may_pass_unseen=True,
    ),
    Fault(
        name="SQLite gone",
        how="its folder is renamed, and comes back",
        outside=acts.take_the_database_away,
        message=r"can't be used any more|waiting for it",
        may_pass_unseen=True,
        ends=frozenset({"answer", "error"}),
    ),
    Fault(
        name="SQLite read-only",
        how="its file system was remounted read-only after a driver was killed",
        stage=acts.read_only_database,
        mend=acts.make_it_writable,
        resumes=True,
        message=r"read-?only",
        ends=frozenset({"error"}),
        needs_root=True,
    ),
    Fault(
        name="SQLite's disk full",
        how="its file system is full from one moment on",
        outside=acts.fill_the_disk,
        stage=acts.small_database,
        mend=acts.free_the_disk,
        message=r"can't be used any more .*full.*--resume, after freeing",
        ends=frozenset({"answer", "error"}),
        needs_root=True,
    ),
    Fault(
        name="PostgreSQL gone",
        how="the server is stopped, or crashes, and is started again",
        outside=acts.stop_the_server,
        message="does not answer .* waiting for it",
        database="postgres",
    ),
    Fault(
        name="PostgreSQL read-only",
        how="connections are cut and new ones may only read, as after a failover",
        outside=acts.make_the_server_read_only,
        message=r"can't be used any more .*read-only",
        database="postgres",
        ends=frozenset({"answer", "error"}),
    ),
    Fault(
        name="node's actor killed",
        how="SIGKILL to the cluster's process that holds the slot",
        outside=acts.kill_the_actor,
        message=r"was lost during a measurement.*Trying again",
        may_pass_unseen=True,
        places=("ray",),
        why_not_elsewhere="there the driver itself holds the slot",
    ),
    Fault(
        name="node lost",
        how="a node of the cluster is gone without a word",
        outside=acts.lose_the_node,
        slots=1,
        nodes=3,
        message=r"was lost during a measurement.*Trying again",
        may_pass_unseen=True,
        places=("ray",),
        why_not_elsewhere="there is one machine",
        heavy=True,
    ),
    Fault(
        name="Ray's head lost",
        how=(
            "the head's server is gone without a word, alone or with its raylet, under a long probe"
        ),
        inside=lambda random: {"name": "sleep", "seconds": 45},
        outside=acts.kill_the_head,
        stage=acts.own_cluster,
        mend=acts.start_another_cluster,
        places=("ray",),
        message="The head of the Ray cluster does not answer any more",
        why_not_elsewhere="there is no cluster",
        heavy=True,
        slots=1,
        deadline_seconds=60.0,
        ends=frozenset({"answer", "error"}),
    ),
    Fault(
        name="GPU taken by others",
        how="between two probes a stranger's process has half of it, by a recording of NVML",
        message=r"not as empty as it was.*Trying again",
        slots=1,
        gpus=True,
        heavy_on=("ray",),  # a node waits half a minute
    ),
)
