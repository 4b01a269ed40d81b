"""A rendezvous at a port that another program holds."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
os.environ.update(
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT=str(listener.getsockname()[1]),
    RANK="0",
    WORLD_SIZE="1",
)
dist.init_process_group("gloo")
