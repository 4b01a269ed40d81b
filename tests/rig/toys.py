"""Candidates and executors of the toy adapter, for the tests of rigs and executors."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.executors.local import LocalExecutor
from autotune.trainers.base import ProbePlan

ADAPTER = Path(__file__).parent / "toy_adapter.py"
MIB = 2**20


def toy(*script: dict[str, Any], load: tuple[dict[str, Any], ...] = (), **request: Any) -> Candidate:
    """A candidate that does this, in ranks that did `load` before."""
    settings = {"load": json.dumps(list(load)), "request": json.dumps({"script": list(script), **request})}
    return Candidate(knobs=settings, settings=settings, load={"load": settings["load"]})


def executor(
    tmp_path: Path, *, ranks: int = 1, limit_mib: int = 256, hint: dict[str, Any] | None = None, **options: Any
) -> LocalExecutor:
    def load_request(candidate: Candidate) -> dict[str, Any]:
        return {**(hint or {}), "script": json.loads(str(candidate.settings["load"]))}

    def probe_request(candidate: Candidate, plan: ProbePlan) -> dict[str, Any]:
        return dict(json.loads(str(candidate.settings["request"])))

    given = {"python": Path(sys.executable), "adapter": str(ADAPTER), "scratch_root": tmp_path, **options}
    return LocalExecutor(
        ranks=ranks, load_request=load_request, probe_request=probe_request, limit_bytes=limit_mib * MIB, **given
    )


def plan(seconds: float = 20.0) -> ProbePlan:
    return ProbePlan(deadline_seconds=seconds)


def running(pid: int) -> bool:
    """Whether the process is there and not merely waiting to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def gone(*pids: int, within: float = 5.0) -> bool:
    deadline = time.monotonic() + within
    while any(running(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def tree_of(pid: int) -> list[int]:
    from autotune.inside.processes import descendants

    return [pid, *descendants(pid)]


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root}
