"""A run that finishes and talks of errors."""

from __future__ import annotations

from parts import loop

print(
    "If you see CUDA out of memory, lower the batch size; exitcode -9 means that the kernel"
    " ended it."
)
print("ERROR rate of the judge: 0.02; Traceback of the search: none; NCCL error count: 0")
loop(
    then=lambda _: print(
        "WARNING: one reward timed out and counts as 0: ConnectionError: the judge is busy"
    )
)
