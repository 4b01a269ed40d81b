"""An actor of verl's kind under Ray, whose layers find no room."""

from __future__ import annotations

import ray
from parts import causal_model, fail_at, gpu_memory, out_of_memory

ray.init(
    num_cpus=2,
    include_dashboard=False,
    log_to_driver=True,
)


@ray.remote
class WorkerDict:
    def actor_rollout_update_actor(self):
        message = gpu_memory(
            "2.90 GiB",
            total="79.19 GiB",
            free="512.00 MiB",
            process="78.60 GiB",
            live="76.02 GiB",
            idle="1.40 GiB",
        )
        fail_at(
            "transformers.models.qwen2.modeling_qwen2:Qwen2MLP.forward",
            out_of_memory(message),
            call=2,
        )
        return self.update_policy(causal_model())

    def update_policy(self, model):
        import torch

        return model(torch.ones(2, 8, dtype=torch.long)).logits.mean().backward()


ray.get(WorkerDict.remote().actor_rollout_update_actor.remote())
