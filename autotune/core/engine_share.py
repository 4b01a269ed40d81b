"""Share of a GPU's memory that a rollout engine reserves, under a memory limit.

    C   bytes that CUDA offers of the whole GPU: its memory, less what the driver reserves
    L   bytes that CUDA would offer of a GPU as large as the limit: the limit, less the same
    s   share of the limit: flags, search spaces, predictions, probes and answers
    S   share of the GPU: what vLLM itself reads, in files, scripts and commands of a training

    engine = s · L = S · C,  therefore  S = s · L / C  and  s = S · C / L

Under a limit, a share within autotune is one of the limit: what fits there has to fit a GPU of that
size. vLLM has no limit and multiplies its share by all memory that CUDA reports, also in the
training that a written file starts. A probe therefore scales the share that it passes on, a written
file has the scaled share, and the share of the user's file is scaled up.

Example: 80 GiB with a limit of 40 GiB, and a driver that reserves 500 MiB. L / C = 39.51 / 79.51. A
share of 0.5 is an engine of 19.76 GiB, and 0.2485 in the written file.
"""

from __future__ import annotations

DIGITS = 4  # of a share in a file: 8 MiB of 80 GiB


def usable_bytes(size_bytes: int, reserved_bytes: int | None) -> int:
    """Return what CUDA offers of this size: drivers reserve the same on a smaller GPU."""
    return max(0, size_bytes - (reserved_bytes or 0))


def share_scale(usable_limit: int, usable_memory: int) -> float:
    """Return L / C: the share of the GPU for each share of the limit."""
    if usable_memory <= 0:
        raise ValueError(f"a GPU of {usable_memory} bytes has no shares")
    return min(1.0, usable_limit / usable_memory)


def share_of_gpu(share: float, scale: float) -> float:
    """Return the share that vLLM reads in a training that nothing limits."""
    return round(share * scale, DIGITS)


def share_of_limit(share: float, scale: float) -> float:
    """Return the share within autotune: the simplest one that is written as this share of the GPU.

    At most 1, the whole limit, which an engine never gets. A share above 1 stays, to be refused.
    """
    if share > 1:
        return share
    if share >= scale:
        return 1.0
    for digits in range(1, DIGITS):
        simple = round(share / scale, digits)
        if share_of_gpu(simple, scale) == round(share, DIGITS):
            return simple
    return round(share / scale, DIGITS)
