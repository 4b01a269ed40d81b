"""An override without its value."""

from __future__ import annotations

import runpy
import sys

sys.argv = ["main_ppo", "data.train_batch_size"]
runpy.run_module("verl.trainer.main_ppo", run_name="__main__")
