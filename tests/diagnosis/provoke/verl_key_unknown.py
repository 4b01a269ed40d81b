"""A setting that verl does not have."""

from __future__ import annotations

import runpy
import sys

sys.argv = ["main_ppo", "actor_rollout_ref.rollout.max_sequences=64", "data.train_batch_size=8"]
runpy.run_module("verl.trainer.main_ppo", run_name="__main__")
