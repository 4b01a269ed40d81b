"""A Ray cluster of several nodes on this machine, and an executor of the toy adapter on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from autotune.core.job import Hardware
from autotune.probe.executors.ray import RayExecutor
from tests.probe.toys import MIB, requests, settings

ROOT = str(Path(__file__).parents[2])


@contextmanager
def cluster(
    nodes: int = 2,
    cpus: int = 2,
    gpus: int = 0,
    in_front: Path | None = None,
) -> Iterator[Any]:
    """Real raylets, each with an object store of its own; their PYTHONPATH is this tree, with
    `in_front` before it.
    """
    import os

    from ray.cluster_utils import Cluster

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = ":".join(
        [*([str(in_front)] if in_front else []), ROOT, *([before] if before else [])]
    )
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Workers would run at niceness 15: on a busy machine their probes would miss deadlines.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    small = {
        "num_cpus": cpus,
        "num_gpus": gpus,
        "object_store_memory": 80 * MIB,
        "include_dashboard": False,
    }
    ray_cluster = Cluster(initialize_head=True, head_node_args=small)
    try:
        for _ in range(nodes - 1):
            ray_cluster.add_node(**small)
        yield ray_cluster
    finally:
        ray_cluster.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def ray_executor(
    address: str,
    tmp_path: Path,
    *,
    hint: dict[str, Any] | None = None,
    slots: int | None = None,
    **options: Any,
) -> RayExecutor:
    runner_settings = settings(tmp_path, **options)
    hardware = Hardware(
        kind="cpu",
        name="cpu",
        count=runner_settings.ranks,
        memory_bytes=runner_settings.limit_bytes,
        here=True,
    )
    return RayExecutor(
        runner_settings,
        requests(hint),
        hardware=hardware,
        address=address,
        slots=slots,
    )
