"""Communicators of a training rank, whose buffers NCCL allocates."""

from __future__ import annotations

from autotune.core.composition import Composition


def communicators(composition: Composition) -> int:
    """Return the number of a training rank's communicators that carry anything: the first operation
    allocates their buffers. One that is created and never used has none (NCCL from 2.22 on,
    `runtimeConn` in its init.cc).

    torch's default one; one in which ZeRO-1 and ZeRO-2 reduce (ZeRO-3 uses the default one); for an
    engine under tensor parallelism its own and, in the trainer's process, one in which its prompts
    are gathered; the one with a server, to which weights are sent.
    """
    engine, count = composition.engine, 0
    if composition.ranks > 1:
        count += 1
    if composition.sharded_by in ("zero1", "zero2"):
        count += 1
    if engine is not None and engine.tensor_parallel > 1:
        count += 1 if engine.apart else 2
    if joins_server(composition):
        count += 1
    return max(composition.processes, count)


def communicators_at_engine_start(composition: Composition) -> int:
    """Return the number when an engine in the trainer's process starts: the one with which
    ZeRO-3 loads its weights, and the engine's own. The first operation of the others comes
    later.
    """
    engine = composition.engine
    if engine is None or engine.apart:
        return communicators(composition)
    return (composition.sharded_by == "zero3") + (engine.tensor_parallel > 1)


def joins_server(composition: Composition) -> bool:
    """Return True if the trainer and a server, to which it sends weights, have a communicator."""
    return composition.generation == "server" and composition.split is not None
