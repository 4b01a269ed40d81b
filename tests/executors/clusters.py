"""A Ray cluster of several nodes on this machine, and an executor of the toy adapter on it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.candidate import Candidate
from autotune.executors.ray import RayExecutor
from autotune.hardware import Hardware
from autotune.trainers.base import ProbePlan
from tests.rig.toys import ADAPTER, MIB

ROOT = str(Path(__file__).parents[2])


@contextmanager
def cluster(nodes: int = 2, cpus: int = 2, gpus: int = 0, in_front: Path | None = None) -> Iterator[Any]:
    """Real raylets, each with an object store of its own; they see this tree's code whatever folder they were started in, and
    what lies `in_front` before all else."""
    import os

    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = ":".join([*([str(in_front)] if in_front else []), ROOT, *([before] if before else [])])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Workers would run at niceness 15: beside anything else they get no processor, and what is timed there meets its deadline.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - Ray spells its options so
    small = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": 80 * MIB, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=small)
    try:
        for _ in range(nodes - 1):
            made.add_node(**small)
        yield made
    finally:
        made.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def ray_executor(
    address: str, tmp_path: Path, *, ranks: int = 1, limit_mib: int = 256, hint: dict[str, Any] | None = None, **options: Any
) -> RayExecutor:
    def load_request(candidate: Candidate) -> dict[str, Any]:
        return {**(hint or {}), "script": json.loads(str(candidate.settings["load"]))}

    def probe_request(candidate: Candidate, plan: ProbePlan) -> dict[str, Any]:
        return dict(json.loads(str(candidate.settings["request"])))

    hardware = Hardware(kind="cpu", name="cpu", count=ranks, memory_bytes=limit_mib * MIB, here=True)
    given = {"python": Path(sys.executable), "adapter": str(ADAPTER), "scratch_root": tmp_path, **options}
    return RayExecutor(
        ranks=ranks, load_request=load_request, probe_request=probe_request, limit_bytes=limit_mib * MIB, hardware=hardware,
        address=address, **given,
    )  # fmt: skip
