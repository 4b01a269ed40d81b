"""A list that outgrows the memory that the machine grants."""

from __future__ import annotations

from parts import loop

kept: list[bytearray] = []


def read(_):
    while True:
        kept.append(bytearray(2**28))


loop(then=read)
