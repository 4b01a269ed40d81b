"""A barrier that one of two ranks does not reach in time."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist

dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    time.sleep(12)
dist.monitored_barrier(timeout=timedelta(seconds=4))
