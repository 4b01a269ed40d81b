"""Memory of one rank of a sharded model: a plain trace rewritten into the trace of one rank.

FSDP2 is traced sharded. For the other kinds, a rewriter repeats what the library does at each
module and gradient of a plain trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autotune.core.trace import Trace
from autotune.estimate.sharding.ddp import Ddp
from autotune.estimate.sharding.fsdp1 import Fsdp1
from autotune.estimate.sharding.sharding_options import Sharding
from autotune.estimate.sharding.zero3 import Zero3
from autotune.estimate.sharding.zero12 import Zero12, fullest_rank

__all__ = ["ShardedTrace", "Sharding", "apply", "compared_ranks"]

REWRITERS = {"ddp": Ddp, "fsdp1": Fsdp1, "zero1": Zero12, "zero2": Zero12, "zero3": Zero3}


@dataclass(frozen=True, kw_only=True)
class ShardedTrace:
    """Trace of one rank."""

    trace: Trace
    host_bytes: int = 0  # offloaded


def apply(trace: Trace, sharding: Sharding) -> ShardedTrace:
    """Return the trace of one rank, from a plain trace (FSDP2: a trace of a sharded step)."""
    alone = sharding.ranks == 1 and not (sharding.kind == "fsdp1" and sharding.master_bytes)
    if sharding.kind in ("none", "fsdp2") or alone:  # FSDP1 with masters keeps separate weights on one rank, too
        return ShardedTrace(trace=trace)
    if trace.usage is None:
        raise ValueError(
            f"{sharding.kind}: the trace has no parameter uses by module. Trace it with sharding kind {sharding.kind}."
        )
    rewriter = REWRITERS[sharding.kind](trace, trace.usage, sharding)
    return ShardedTrace(trace=rewriter.rewritten(), host_bytes=rewriter.host_bytes)


def compared_ranks(trace: Trace, sharding: Sharding) -> list[ShardedTrace]:
    """Return the ranks one of which reserves most: first, last and, under ZeRO-1 and ZeRO-2, the one with most reduced
    gradients; with `begins_on_meta`, the last."""
    if sharding.begins_on_meta and sharding.ranks > 1:
        return [apply(trace, replace(sharding, rank=sharding.ranks - 1))]
    ranks = {0, sharding.ranks - 1}
    if sharding.kind in ("zero1", "zero2") and trace.usage is not None:
        ranks.add(fullest_rank(trace.usage, sharding.ranks))
    return [apply(trace, replace(sharding, rank=rank)) for rank in sorted(ranks)]
