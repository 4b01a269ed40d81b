"""A data set's worker process that the kernel kills for lack of memory."""

from __future__ import annotations

from parts import rows


def grow(row):
    row["kept"] = [bytearray(2**24) for _ in range(256)]
    return row


if __name__ == "__main__":
    rows(text="one").map(grow, num_proc=2)
