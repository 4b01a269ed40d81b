"""A tracker that cannot be reached."""

from __future__ import annotations

import wandb
from parts import sft

wandb.init(project="grpo", settings=wandb.Settings(init_timeout=10))
sft()
