"""A rank that waits for another, which is busy with something else."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=6))
if os.environ["RANK"] == "1":
    time.sleep(30)
dist.all_reduce(torch.ones(4))
