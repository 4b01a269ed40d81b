"""NCCL's communicators of a training rank that carry anything: the first operation allocates their buffers.

One that is created and never used has none (NCCL from 2.22 on, `runtimeConn` in its init.cc).
"""

from __future__ import annotations

from autotune.core.composition import Composition


def count(composition: Composition) -> int:
    """Return the number of communicators on the first rank.

    torch's default one; one in which ZeRO-1 and ZeRO-2 reduce (ZeRO-3 uses the default one); for an
    engine under tensor parallelism its own and, in the trainer's process, one in which its prompts are
    gathered; the one with a server, to which weights are sent.
    """
    engine = composition.engine
    own = (composition.ranks > 1) + (composition.sharded_by in ("zero1", "zero2"))
    of_engine = 0 if engine is None or engine.tensor_parallel == 1 else 2 - engine.apart
    return max(composition.processes, own + of_engine + joins_server(composition))


def at_engine_start(composition: Composition) -> int:
    """Return the number when an engine in the trainer's process starts: the one with which ZeRO-3 loads its
    weights, and the engine's own. The first operation of the others comes later."""
    engine = composition.engine
    if engine is None or engine.apart:
        return count(composition)
    return (composition.sharded_by == "zero3") + (engine.tensor_parallel > 1)


def joins_server(composition: Composition) -> bool:
    return composition.generation == "server" and composition.split is not None
