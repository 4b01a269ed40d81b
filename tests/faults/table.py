"""The closed table of faults: how each is provoked, where, and what must be true afterwards.

After every one of them: no process is left, no slot is missing, no measurement is lost or invented, the study
resumes to the same answer that it would have had, and the user was told in a sentence.
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
from tests.study.postgres import installed

End = Literal["answer", "error", "killed"]
Place = Literal["local", "ray"]
PLACES: tuple[Place, ...] = get_args(Place)
Inside = Callable[[Random], Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One row."""

    name: str
    how: str
    """How it is provoked."""

    inside: Inside | None = None
    """What the probe itself does."""

    outside: Act | None = None
    """What is done while the search runs."""

    told: str | None = None
    """The user reads this; None where nobody is left to say it, or there is nothing to say."""

    may_pass_unseen: bool = False
    """At some moments it harms nobody: then there is nothing to tell either."""

    outcomes: frozenset[str] = frozenset()
    """What may become of probes, beside `ok`."""

    ends: frozenset[End] = frozenset({"answer"})
    """How the driver may end."""

    places: tuple[Place, ...] = ("local", "ray")
    why_not_elsewhere: str = ""
    stage: Callable[[Scene], AbstractContextManager[None]] = acts.as_it_is
    mend: Act | None = None
    """What is put right before the study is resumed."""

    slots: int | None = None
    """None for one or two, as the seed says."""

    ranks: int = 1
    nodes: int = 2
    """So many a cluster needs, at least."""

    deadline_seconds: float = 30.0
    database: Literal["sqlite", "postgres"] = "sqlite"
    resumes: bool = False
    """Whether the study was begun before."""

    gpus: bool = False
    heavy: bool = False
    """Takes long: fewer seeds."""

    heavy_on: tuple[Place, ...] = ()
    """Places where it does, if not at all of them."""

    needs_root: bool = False


def why_not_here(fault: Fault, place: Place) -> str | None:
    """What is missing for it; None where it can be played."""
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
    words = random.choice([
        b'no json\n[1, 2]\n{"event": "measured", "id": \n{"event": "ph',
        b'{"event": "measured", "id": 3, "rank": 0, "result": {"worst": {"cycle_sec',
        b'{"event": "lost", "id": null, "rank": "all"}\n',
        b"[" * 100_000 + b"\n",
        b'\n{"event": "measured", "id": 1e999, "result": NaN}\n',
        random.randbytes(100_000),
        b"x" * 2_000_000,
    ])  # fmt: skip
    return {"name": "wire", "words": words.hex(), "then": random.choice([None, "killed", "exits"])}


def _nonsense(random: Random) -> Mapping[str, Any]:
    seconds = random.choice([["soon"], [-1.0], [0.0], [1e300, 1], [], "never"])
    speed = {"completion_tokens": 1, "cycle_seconds": seconds, "cycle_loss_tokens": [10**9], "prompt_tokens": 0}
    results = [{"worst": speed}, {"worst": 7}, [1], {"peak_bytes": -1}, {"world_size": "x"}]
    return {"name": "nonsense", "result": random.choice(results)}


FAULTS = (
    Fault(
        name="probe killed", how="SIGKILL to the rank at a random moment", outside=acts.kill_the_probe, told="SIGKILL",
        may_pass_unseen=True, outcomes=frozenset({"crash"}),
    ),
    Fault(
        name="keeper killed", how="SIGKILL to the parent of the ranks at a random moment", outside=acts.kill_the_keeper,
        told=r"keeper of the rig ended.*Trying again", may_pass_unseen=True,
    ),
    Fault(
        name="grandchild left", how="a daemon in a session of its own; its probe then ends well, raises, exits or is killed",
        inside=lambda random: {"name": "grandchild", "then": random.choice([None, "raises", "exits", "killed"])},
        told=r"SIGKILL|grandchild|exit code 1", may_pass_unseen=True, outcomes=frozenset({"crash"}),
    ),
    Fault(
        name="hangs in Python", how="an endless loop that ignores SIGTERM", inside=lambda random: {"name": "hang in Python"},
        told="no answer after .* ended at its deadline", outcomes=frozenset({"timeout"}), deadline_seconds=4.0,
    ),
    Fault(
        name="hangs in C", how="a native call that keeps the interpreter's lock", inside=lambda random: {"name": "hang in C"},
        told="no answer after .* ended at its deadline", outcomes=frozenset({"timeout"}), deadline_seconds=4.0,
    ),
    Fault(
        name="hangs in a collective", how="all_reduce over gloo that one of two ranks never joins",
        inside=lambda random: {"name": "hang in a collective"}, told="no answer after .* ended at its deadline",
        outcomes=frozenset({"timeout"}), deadline_seconds=20.0, ranks=2, slots=1, heavy=True,
    ),
    Fault(
        name="floods its output", how="1 GiB on stdout", inside=lambda random: {"name": "flood", "mib": 1024}, slots=1,
        heavy=True, deadline_seconds=100.0,
    ),
    Fault(
        name="broken wire", how="half lines, nonsense, deep nesting, bytes that are no text; then goes on, exits or is killed",
        inside=_wire, told="exit code 1|SIGKILL", may_pass_unseen=True, outcomes=frozenset({"crash"}),
    ),
    Fault(
        name="answers nonsense", how="an answer in JSON that has not the agreed form", inside=_nonsense, told="agreed form",
        outcomes=frozenset({"crash"}),
    ),
    Fault(
        name="eats memory", how="private or shared memory beyond the limit",
        inside=lambda random: {"name": "memory", "mib": random.randrange(300, 600), "shared": random.random() < 0.5},
        told="memory|SIGKILL", outcomes=frozenset({"oom_load", "oom_rollout"}),
    ),
    Fault(
        name="exits 0 without a result", how="os._exit(0)", inside=lambda random: {"name": "exit 0"},
        told="exit code 0 and no result", outcomes=frozenset({"crash"}),
    ),
    Fault(
        name="fills the disk", how="writes into scratch, a small file system, until it is full",
        inside=lambda random: {"name": "disk"}, told="No space left", outcomes=frozenset({"crash"}), stage=acts.small_scratch,
        needs_root=True,
    ),
    Fault(
        name="driver killed", how="SIGKILL at a random moment", outside=acts.kill_the_driver,
        ends=frozenset({"killed", "answer"}),
    ),
    Fault(
        name="clock jumps", outside=acts.jump_the_clock, stage=acts.jumping_clock, heavy=True,
        how="time of day up to eleven days off, in either direction, at every tenth call (LD_PRELOAD); on Ray once, by nine",
    ),
    Fault(
        name="SQLite locked", how="another process holds it exclusively for seconds", outside=acts.lock_the_database,
        told="does not answer .*locked.* waiting for it", may_pass_unseen=True,
    ),
    Fault(
        name="SQLite gone", how="its folder is renamed, and comes back", outside=acts.take_the_database_away,
        told=r"can't be used any more|waiting for it", may_pass_unseen=True, ends=frozenset({"answer", "error"}),
    ),
    Fault(
        name="SQLite read-only", how="its file system was remounted read-only after a driver was killed",
        stage=acts.read_only_database, mend=acts.make_it_writable, resumes=True, told=r"read-?only", ends=frozenset({"error"}),
        needs_root=True,
    ),
    Fault(
        name="SQLite's disk full", how="its file system is full for seconds", outside=acts.free_the_disk,
        stage=acts.small_database,
        told=r"does not answer .*full.* waiting for it|can't be used any more .*full", may_pass_unseen=True,
        ends=frozenset({"answer", "error"}),
        needs_root=True,
    ),
    Fault(
        name="PostgreSQL gone", how="the server is stopped, or crashes, and is started again", outside=acts.stop_the_server,
        told="does not answer .* waiting for it", database="postgres",
    ),
    Fault(
        name="PostgreSQL read-only", how="connections are cut and new ones may only read, as after a failover",
        outside=acts.make_the_server_read_only, told=r"can't be used any more .*read-only", database="postgres",
        ends=frozenset({"error"}),
    ),
    Fault(
        name="node's worker killed", how="SIGKILL to the cluster's process that holds the slot", outside=acts.kill_the_worker,
        told=r"was lost while it was measuring.*Trying again", may_pass_unseen=True, places=("ray",),
        why_not_elsewhere="there the driver itself holds the slot",
    ),
    Fault(
        name="node lost", how="a node of the cluster is gone without a word", outside=acts.lose_the_node, slots=1, nodes=3,
        told=r"was lost while it was measuring.*Trying again", may_pass_unseen=True, places=("ray",),
        why_not_elsewhere="there is one machine", heavy=True,
    ),
    Fault(
        name="GPU taken by others", how="between two probes a stranger's process has half of it, by a recording of NVML",
        told=r"not as empty as it was.*Trying again", slots=1, gpus=True, heavy_on=("ray",),  # a node waits half a minute
    ),
)  # fmt: skip
