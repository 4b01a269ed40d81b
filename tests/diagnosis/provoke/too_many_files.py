"""More open files than are allowed."""

from __future__ import annotations

from parts import loop

files = []
loop(then=lambda _: files.extend(open(f"shard-{number}", "w") for number in range(500)))  # noqa: PTH123, SIM115
