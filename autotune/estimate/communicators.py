"""NCCL's communicators of a training rank that carry anything: the first operation allocates their buffers.

One that is created and never used has none (NCCL from 2.22 on, `runtimeConn` in its init.cc).
"""

from __future__ import annotations

from autotune.core.composition import Composition


def count(composition: Composition) -> int:
    """Return the number of communicators on the first rank.

    torch's default one; one in which ZeRO-1 and ZeRO-2 reduce (ZeRO-3 uses the default one); for an
    engine under tensor parallelism its own, and one in which the trainer gathers the engine's prompts;
    the one with a server, to which weights are sent.
    """
    engine = composition.engine
    own = (composition.ranks > 1) + (composition.sharded_by in ("zero1", "zero2"))
    of_engine = 0 if engine is None or engine.tensor_parallel == 1 else 1 + has_engine(composition)
    return max(composition.processes, own + of_engine + joins_server(composition))


def count_at_engine_start(composition: Composition) -> int:
    """Return how many there are when an engine in the trainer's process has just started: the one with
    which ZeRO-3 loads its weights, and the engine's own."""
    if not has_engine(composition):
        return count(composition)
    assert composition.engine is not None
    return (composition.sharded_by == "zero3") + (composition.engine.tensor_parallel > 1)


def joins_server(composition: Composition) -> bool:
    return composition.generation == "server" and composition.split is not None


def has_engine(composition: Composition) -> bool:
    """Return True for an engine in the trainer's process."""
    return composition.engine is not None and not composition.engine.apart
