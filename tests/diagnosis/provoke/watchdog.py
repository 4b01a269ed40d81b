"""A GPU collective that never ends, in the watchdog's words."""

from __future__ import annotations

import os
import sys
import time

if os.environ["RANK"] == "0":
    source_file = "ProcessGroupNCCL.cpp"
    work = (
        "WorkNCCL(SeqNum=4711, OpType=_ALLGATHER_BASE, NumelIn=13107200, NumelOut=104857600,"
        " Timeout(ms)=1800000)"
    )
    time.sleep(1)
    for line, message in (
        (
            632,
            (
                f"Watchdog caught collective operation timeout: {work} ran for 1800027 milliseconds"
                " before timing out."
            ),
        ),
        (756, "Some NCCL operations have failed or timed out."),
        (762, "To avoid data inconsistency, we are taking the entire process down."),
    ):
        print(
            f"[rank0]:[E1120 18:14:00.860000000 {source_file}:{line}] [Rank 0] {message}",
            file=sys.stderr,
            flush=True,
        )
    os.abort()
time.sleep(60)
