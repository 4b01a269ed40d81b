"""A training script that knows nothing of autotune: plain torch, a log of JSON lines, and a
batch that may be too large.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bs", type=int, required=True)
    parser.add_argument("--len", type=int, default=64)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(args.steps):
        began = time.perf_counter()
        net(torch.randn(args.bs, args.len, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds, tokens = time.perf_counter() - began, args.bs * args.len
        print(f"step {step}: {tokens / seconds:.1f} tok/s", flush=True)
        if args.log:
            with args.log.open("a") as file:
                file.write(json.dumps({"step": step, "tokens": tokens, "seconds": seconds}) + "\n")


main()
