"""verl without the micro-batch that it requires."""

from __future__ import annotations

import runpy
import sys

sys.argv = [
    "main_ppo",
    "data.train_batch_size=8",
    "trainer.n_gpus_per_node=1",
    "ray_kwargs.ray_init.num_cpus=2",
]
runpy.run_module("verl.trainer.main_ppo", run_name="__main__")
