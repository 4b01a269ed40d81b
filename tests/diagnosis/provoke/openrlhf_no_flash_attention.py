"""OpenRLHF where flash-attention is missing."""

from __future__ import annotations

import runpy

runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
