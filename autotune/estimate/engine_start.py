"""The trainer as an engine in its process finds it when it starts."""

from __future__ import annotations

from autotune.core.composition import Composition
from autotune.estimate import communicators as all_communicators


def communicators(composition: Composition) -> int:
    """Return the number of NCCL's communicators that have buffers: the one with which ZeRO-3 loads its
    weights, and the engine's own. The first operation of the others comes later."""
    engine = composition.engine
    if engine is None or engine.apart:
        return all_communicators.count(composition)
    return (composition.sharded_by == "zero3") + (engine.tensor_parallel > 1)


def parts(composition: Composition) -> tuple[str, ...] | None:
    """Return the trainer's parts that exist; None: all of them, on one rank.

    Masters, buffers and broadcasts come later. FSDP has the model on the host until then.
    """
    engine = composition.engine
    if engine is None or engine.apart or composition.ranks == 1:
        return None
    return () if composition.sharded_by.startswith("fsdp") else ("weights", "adapters")
