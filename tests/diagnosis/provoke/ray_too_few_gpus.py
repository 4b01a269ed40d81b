"""A pool of GPUs that the machine does not have."""

from __future__ import annotations

import ray
from omegaconf import OmegaConf
from verl.single_controller.ray.base import RayResourcePool
from verl.trainer.ppo.ray_trainer import ResourcePoolManager

ray.init(num_cpus=2, include_dashboard=False)
print(RayResourcePool, OmegaConf)
manager = ResourcePoolManager(resource_pool_spec={"global_pool": [8]}, mapping={})
manager.create_resource_pool()
