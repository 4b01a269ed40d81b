"""A list that outgrows the memory that the machine grants."""

from __future__ import annotations

from parts import loop

buffers: list[bytearray] = []


def read(_):
    while True:
        buffers.append(bytearray(2**28))


loop(then=read)
