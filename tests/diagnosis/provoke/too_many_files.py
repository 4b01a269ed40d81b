"""More open files than are allowed."""

from __future__ import annotations

from parts import loop

files = []


def open_many(_: object) -> None:
    for number in range(500):
        files.append(open(f"shard-{number}", "w"))  # noqa: PTH123, SIM115


loop(then=open_many)
