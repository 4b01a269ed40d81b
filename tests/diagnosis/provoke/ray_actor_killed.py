"""An actor under Ray that the kernel kills for lack of memory."""

from __future__ import annotations

from pathlib import Path

import ray

GROUP = Path("/sys/fs/cgroup/memory/provoke-ray")


@ray.remote(max_restarts=0)
class WorkerDict:
    def actor_rollout_generate_sequences(self):
        import numpy

        (GROUP / "cgroup.procs").write_text("0")
        return [numpy.ones(2**24) for _ in range(64)]


GROUP.mkdir(exist_ok=True)
(GROUP / "memory.limit_in_bytes").write_text("400M")
ray.init(num_cpus=2, include_dashboard=False)
ray.get(WorkerDict.remote().actor_rollout_generate_sequences.remote())
