"""Candidates and executors of the toy adapter, for the tests of probes and executors."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.core.measurement import ProbePlan
from autotune.core.space import Candidate
from autotune.probe.executors.local import LocalExecutor
from autotune.probe.executors.local_places import SlotPlace
from autotune.probe.gpu_set import Gpus
from autotune.probe.runner import RequestBuilders
from autotune.probe.worker_process import RunnerSettings

ADAPTER = Path(__file__).parent / "toy_adapter.py"
MIB = 2**20


def toy(
    *script: dict[str, Any], load: tuple[dict[str, Any], ...] = (), **request: Any
) -> Candidate:
    """Return a candidate with this script, in ranks that ran `load` before."""
    settings = {
        "load": json.dumps(list(load)),
        "request": json.dumps({"script": list(script), **request}),
    }
    return Candidate(
        knobs=settings,
        settings=settings,
        load={"load": settings["load"]},
    )


def executor(
    tmp_path: Path,
    *,
    hint: dict[str, Any] | None = None,
    places: Sequence[SlotPlace] = (SlotPlace(),),
    open_gpus: Callable[[], Gpus] | None = None,
    **options: Any,
) -> LocalExecutor:
    return LocalExecutor(
        settings(tmp_path, **options), requests(hint), places=places, open_gpus=open_gpus
    )


def settings(tmp_path: Path, *, limit_mib: int = 256, **options: Any) -> RunnerSettings:
    runner_options = {
        "python": Path(sys.executable),
        "adapter": str(ADAPTER),
        "ranks": 1,
        "scratch_root": tmp_path,
        **options,
    }
    return RunnerSettings(limit_bytes=limit_mib * MIB, **runner_options)


def requests(hint: dict[str, Any] | None = None) -> RequestBuilders:
    def load_request(candidate: Candidate) -> dict[str, Any]:
        return {**(hint or {}), "script": json.loads(str(candidate.settings["load"]))}

    def probe_request(candidate: Candidate, plan: ProbePlan) -> dict[str, Any]:
        return dict(json.loads(str(candidate.settings["request"])))

    return RequestBuilders(load=load_request, probe=probe_request)


def plan(seconds: float = 20.0) -> ProbePlan:
    return ProbePlan(deadline_seconds=seconds)


def running(pid: int) -> bool:
    """Return True for a process that exists and is no zombie."""
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
    from autotune.worker.processes import descendants

    return [pid, *descendants(pid)]


def environment() -> dict[str, str]:
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root}
